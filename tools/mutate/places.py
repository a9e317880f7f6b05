"""The places of a C++ source where a rule plants a fault, read from its text as clang-format leaves
it."""

import dataclasses
import hashlib
import re

COMPARISONS = {'==': '!=', '!=': '==', '<': '<=', '<=': '<', '>': '>=', '>=': '>'}
RELEASES = ('reset', 'clear', 'erase', 'pop_back', 'pop_front', 'pop', 'release', 'close', 'drop',
            'free', 'forget', 'end',
            'remove')
NO_CALL = ('return', 'if', 'for', 'while', 'switch', 'throw', 'delete', 'static_assert', 'sizeof',
           'catch', 'co_return',
           'case', 'defined', 'decltype', 'alignas', 'new', 'else', 'do', 'goto', 'using')


@dataclasses.dataclass
class Mutation:
    rule: str
    text: str       # what stands in the place instead
    number: int = 0
    id: str = ''


@dataclasses.dataclass
class Place:
    """The range [begin, end) of a source, and what may stand there instead. `form`: 'condition',
    'statement' or 'lock'."""
    path: str
    begin: int
    end: int
    line: int
    form: str
    original: str
    mutations: list
    number: int = 0


def mask(text):
    """The text with comments, literals and preprocessor lines blotted out, every other character
    where it was."""
    def blot(found):
        return re.sub(r'[^\n]', ' ' if found[0][0] in '/#' else '_', found[0])
    pattern = (r'^#(?:[^\n]*\\\n)*[^\n]*|//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"'
               r'|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'')
    return re.sub(pattern, blot, text, flags=re.S | re.M)


def closing(masked, opening):
    """Where the bracket closes that opens there; -1: nowhere."""
    depth = 0
    for i in range(opening, len(masked)):
        if masked[i] in '([{':
            depth += 1
        elif masked[i] in ')]}':
            depth -= 1
            if depth == 0:
                return i
    return -1


def top_level(masked, begin, end, pattern):
    """Matches of the pattern in the range that stand in no bracket of it."""
    depth, found = 0, []
    matches = {m.start(): m for m in re.finditer(pattern, masked[begin:end])}
    for i in range(begin, end):
        if masked[i] in '([{':
            depth += 1
        elif masked[i] in ')]}':
            depth -= 1
        elif depth == 0 and i - begin in matches:
            found.append((begin + matches[i - begin].start(), begin + matches[i - begin].end(),
                          matches[i - begin][0]))
    return found


def one_line(text):
    """Code in one line, without comments."""
    return ' '.join(re.sub(r'//[^\n]*|/\*.*?\*/', ' ', text, flags=re.S).split())


def operands(masked, begin, end):
    """(joint, ranges) of a condition: '&&' or '||', or '' and the whole. Of a mixture the looser
    one."""
    for joint in ('||', '&&'):
        joints = top_level(masked, begin, end, re.escape(f' {joint}'))
        if joints:
            edges = [begin] + [x for b, e, _ in joints for x in (b, e)] + [end]
            return joint, list(zip(edges[::2], edges[1::2]))
    return '', [(begin, end)]


def condition_mutations(text, masked, begin, end, *, negates=True):
    if 'is_planted' in masked[begin:end]:
        return    # a place of a fault of the fuzzer's tests
    def with_part(part, new):
        return one_line(text[begin:part[0]] + ' ' + new + ' ' + text[part[1]:end])

    whole = one_line(text[begin:end])
    if negates:
        yield Mutation('condition negated', f'!({whole})')
    joint, parts = operands(masked, begin, end)
    for part in parts:
        if joint:
            yield Mutation('comparison dropped',
                           with_part(part, 'true' if joint == '&&' else 'false'))
        inner = [part]
        if joint == '||':
            _, inner = operands(masked, *part)
            if len(inner) > 1:
                for each in inner:
                    yield Mutation('comparison dropped', with_part(each, 'true'))
        for each in inner:
            signs = top_level(masked, *each, r' (?:==|!=|<=|>=|<|>)(?=\s)')
            if len(signs) != 1:
                continue
            sign_begin, sign_end, sign = signs[0]
            sign = sign.strip()
            if sign in ('==', '!=') and 'ersion' in masked[each[0]:each[1]]:
                yield Mutation('version not checked',
                               with_part(each, 'true' if sign == '==' else 'false'))
            elif sign in ('==', '!=') and negates and not joint:
                continue    # the same as negating all
            else:
                rule = 'comparison replaced' if sign in ('==', '!=') else 'boundary moved'
                yield Mutation(rule, with_part((sign_begin, sign_end), f' {COMPARISONS[sign]}'))


def conditions(text, masked):
    """(begin, end, mutations) of the conditions of `if`, `return`, `? :` and `for`."""
    for found in re.finditer(r'\bif \(', masked):
        close = closing(masked, found.end() - 1)
        begin = found.end()
        for _, after, _ in top_level(masked, begin, close, ';'):
            begin = after
        if top_level(masked, begin, close, r'(?<![=!<>+*/|&-])=(?!=)'):
            continue    # a declaration
        yield begin, close, list(condition_mutations(text, masked, begin, close))
    for found in re.finditer(r'(?:\breturn|[\w\]] =)(?=\s)', masked):
        ends = top_level(masked, found.end(), min(len(masked), found.end() + 2000), r';')
        cut = closing_before(masked, found.end(), ends[0][0] if ends else -1)
        if cut < 0:
            continue
        begin, end = found.end(), cut
        asks = top_level(masked, begin, end, r' \?')
        if asks:
            if not top_level(masked, begin, asks[0][0], r'(?<![=!<>+*/|&-])=(?!=)'):
                yield begin, asks[0][0], list(condition_mutations(text, masked, begin, asks[0][0]))
        elif top_level(masked, begin, end,
                       r' (?:&&|\|\||==|!=|<=|>=|<|>)(?=\s)') and '<<' not in masked[begin:end]:
            yield begin, end, list(condition_mutations(text, masked, begin, end))
    for found in re.finditer(r'\bfor \(', masked):
        close = closing(masked, found.end() - 1)
        semicolons = top_level(masked, found.end(), close, ';')
        if len(semicolons) != 2:
            continue
        begin, end = semicolons[0][1], semicolons[1][0]
        signs = top_level(masked, begin, end, r' (?:<|!=)(?=\s)')
        if len(signs) == 1 and '&&' not in masked[begin:end]:
            left, right = one_line(text[begin:signs[0][0]]), one_line(text[signs[0][1]:end])
            last = f'{left} + 1 < {right}' if signs[0][2].strip(
                ) == '<' else f'std::next({left}) != {right}'
            yield begin, end, [Mutation('boundary moved', last)]


def closing_before(masked, begin, end):
    """`end`, if the range is one expression; -1 if a bracket closes in it that it did not open."""
    depth = 0
    for i in range(begin, end):
        depth += masked[i] in '([{'
        depth -= masked[i] in ')]}'
        if depth < 0:
            return -1
    return end


def statements(text, masked):
    """(begin, end, mutations) of statements that may be left out: calls, and what lets go of
    something."""
    for found in re.finditer(r'(?<=[;{})])\s+(?=[A-Za-z_])|\belse\s+(?=[A-Za-z_])', masked):
        begin = found.end()
        ends = top_level(masked, begin, min(len(masked), begin + 1500), r';')
        end = closing_before(masked, begin, ends[0][0] if ends else -1)
        if end < 0:
            continue
        code = masked[begin:end]
        word = re.match(r'\w+', code)[0]
        if word in NO_CALL or re.fullmatch(r'[A-Z][A-Z0-9_]+', word):
            continue
        lets_go = re.fullmatch(r'[\w.>\-*\[\]()]+ =\s+(?:nullptr|\{\})', code)
        call = re.match(r'(?:[\w:]|\.|->|<[\w:, ]+>|\(\)|\[[\w ]+\])+\(', code)
        is_call = call and code.endswith(')') and closing(code, call.end() - 1) == len(code) - 1
        if not lets_go and not is_call:
            continue
        last_name = re.findall(r'\w+', call[0])[-1] if is_call else ''
        if last_name in ('lock', 'unlock'):
            continue    # counted apart
        is_release = lets_go or any(last_name == name or last_name.startswith(name + '_')
                                    for name in RELEASES)
        yield begin, end + 1, [Mutation('release left out' if is_release else 'call dropped', '')]


def locks(text, masked):
    for found in re.finditer(r'(?:const )?std::lock_guard<([\w:]+)> (\w+)\(([^;]+)\);', masked):
        yield found.start(), found.end(), [
            Mutation('lock dropped',
                     f'std::unique_lock<{found[1]}> {found[2]}({found[3]}, std::defer_lock);')]


def places_of(path, text, kind):
    """The places of one source, none within another, in the order of the text. `kind`: 'faults' or
    'locks'."""
    masked = mask(text)
    found = []
    if kind == 'locks':
        found = [('lock', *each) for each in locks(text, masked)]
    else:
        found = [('condition', *each) for each in conditions(text, masked)]
        found += [('statement', *each) for each in statements(text, masked)]
    found.sort(key=lambda each: each[2] - each[1])    # of nested ones the inner
    taken = []
    for form, begin, end, mutations in found:
        if mutations and all(end <= other.begin or begin >= other.end for other in taken):
            begin += len(text[begin:end]) - len(text[begin:end].lstrip())
            taken.append(Place(path, begin, end, text.count('\n', 0, begin) + 1, form,
                               one_line(text[begin:end]), mutations))
    taken.sort(key=lambda place: place.begin)
    times = {}
    for place in taken:
        for mutation in place.mutations:
            key = f'{path}|{mutation.rule}|{place.original}|{mutation.text}'
            times[key] = times.get(key, 0) + 1
            mutation.id = hashlib.sha1(f'{key}|{times[key]}'.encode()).hexdigest()[:8]
    return taken


def planted(place, text):
    """The code of the place in the library with faults. It has as many lines as before."""
    code = text[place.begin:place.end]
    def is_chosen(mutation):
        return f'::remat::mutation::is({place.number}, {mutation.number})'
    if place.form == 'lock':
        found = re.fullmatch(r'(?:const )?std::lock_guard<([\w:]+)> (\w+)\((.+)\);', code, re.S)
        return (f'std::unique_lock<{found[1]}> {found[2]}({found[3]}, std::defer_lock); '
                f'if (!{is_chosen(place.mutations[0])}) {found[2]}.lock();')
    if place.form == 'statement':
        return f'{{ if (!{is_chosen(place.mutations[0])}) {code} }}'
    chain = ''.join(f'{is_chosen(each)} ? static_cast<bool>({each.text}) : '
                    for each in place.mutations)
    tail = '\n' if '//' in code.rsplit('\n', 1)[-1] else ''
    assert not tail, code
    return f'({chain}static_cast<bool>({code}))'
