"""Plots as SVG text: lines, bars and labelled points, with axes, units and a legend. Nothing but
the standard library."""

import math
from xml.sax.saxutils import escape

COLORS = ("#4c72b0", "#dd8452", "#2e8b57", "#8172b2", "#b5651d", "#444444")
DASHES = ("", "", ' stroke-dasharray="7 4"')  # a line shows beneath the third one
MARK = "#bb3333"
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 78, 36, 74, 58


def text(x, y, words, anchor="start", size=13, color="#222222", turn=None, halo=False):
    around = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    if halo:  # a white copy beneath: not every viewer knows paint-order
        white = text(x, y, words, anchor, size, "white",
                     turn).replace("<text", '<text stroke="white" stroke-width="4"')
        return white + text(x, y, words, anchor, size, color, turn)
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" '
            f'text-anchor="{anchor}"{around}>{escape(words)}</text>')


def line(x1, y1, x2, y2, color="#dddddd", width=1.0, dash=""):
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
            f'stroke-width="{width}"{dashes}/>')


def number(value):
    """A short text for a tick or a bar: 1,000,000 but 0.25."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


class Axis:
    """Maps values to pixels, linearly from 0 (or `low`) or by decades, and chooses ticks."""

    def __init__(self, label, values, log=False, low=None):
        self.label, self.log = label, log
        least, most = min(values), max(values)
        if log:
            self.low, self.high = 10 ** math.floor(math.log10(least)), 10 ** math.ceil(
                math.log10(most))
            if self.low == self.high:
                self.high *= 10
            decades = round(math.log10(self.high / self.low))
            self.ticks = [self.low * 10 ** i for i in range(decades + 1)]
            if decades == 1:
                self.ticks = [self.low * step for step in (1, 2, 5, 10)]
        else:
            self.low = 0 if low is None else low
            step = 10 ** math.floor(math.log10(max(most - self.low, 1e-12)))
            step *= next(factor for factor in (0.1, 0.2, 0.5, 1, 2)
                         if (most - self.low) / (factor * step) <= 6)
            self.high = self.low + step * math.ceil((most - self.low) / step * 1.0001)
            count = round((self.high - self.low) / step)
            self.ticks = [self.low + i * step for i in range(count + 1)]

    def share(self, value):
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Picture:
    def __init__(self, title, subtitle, height=HEIGHT, left=LEFT):
        self.height, self.left = height, left
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                      f'width="{WIDTH}" height="{height}" font-family="sans-serif">',
                      f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
                      text(14, 24, title, size=16),
                      text(14, 43, subtitle, size=12, color="#666666")]

    def x(self, axis, value):
        return self.left + axis.share(value) * (WIDTH - self.left - RIGHT)

    def y(self, axis, value):
        return self.height - BOTTOM - axis.share(value) * (self.height - TOP - BOTTOM)

    def draw_x(self, axis, grid=True):
        for tick in axis.ticks:
            x = self.x(axis, tick)
            if grid:
                self.parts.append(line(x, TOP, x, self.height - BOTTOM))
            self.parts.append(text(x, self.height - BOTTOM + 18, number(tick), "middle", 12))
        middle = (self.left + WIDTH - RIGHT) / 2
        self.parts.append(text(middle, self.height - 16, axis.label, "middle"))

    def draw_y(self, axis):
        for tick in axis.ticks:
            y = self.y(axis, tick)
            self.parts.append(line(self.left, y, WIDTH - RIGHT, y))
            self.parts.append(text(self.left - 8, y + 4, number(tick), "end", 12))
        middle = (TOP + self.height - BOTTOM) / 2
        self.parts.append(text(20, middle, axis.label, "middle", turn=-90))

    def frame(self):
        bottom = self.height - BOTTOM
        self.parts += [line(self.left, bottom, WIDTH - RIGHT, bottom, "#444444"),
                       line(self.left, TOP, self.left, bottom, "#444444")]

    def legend(self, names, mark=None):
        x = self.left
        if mark:
            x = 14
            self.parts += [line(x, 60, x + 22, 60, MARK, 1.5, "6 4"),
                           text(x + 28, 64.5, mark, size=12, color=MARK)]
            x += 28 + 6.6 * len(mark) + 20
        for name, color in names:
            self.parts += [f'<rect x="{x:.1f}" y="54" width="12" height="12" fill="{color}"/>',
                           text(x + 17, 64.5, name, size=12)]
            x += 17 + 6.6 * len(name) + 20

    def done(self):
        return "\n".join(self.parts + ["</svg>"]) + "\n"


def lines(title, subtitle, x_label, y_label, series, log_x=False, log_y=False, marks=()):
    """`series`: (name, [(x, y)]); `marks`: (name, y) of a horizontal line, an aim. A logarithmic
    axis has no place for what is not above 0: differences of noisy times can be."""
    if log_y:
        series = [(name, [point for point in points if point[1] > 0]) for name, points in series]
    xs = [x for _, points in series for x, _ in points]
    ys = [y for _, points in series for _, y in points] + [y for _, y in marks]
    picture = Picture(title, subtitle)
    across, up = Axis(x_label, xs, log_x), Axis(y_label, ys, log_y)
    picture.draw_x(across)
    picture.draw_y(up)
    picture.frame()
    for name, value in marks:
        y = picture.y(up, value)
        picture.parts += [line(picture.left, y, WIDTH - RIGHT, y, MARK, 1.5, "6 4"),
                          text(WIDTH - RIGHT - 4, y - 5, name, "end", 12, MARK)]
    for index, ((_, points), color) in enumerate(zip(series, COLORS)):
        places = [(picture.x(across, x), picture.y(up, y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        picture.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" '
                             f'stroke-width="2"{DASHES[index % 3]}/>')
        picture.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>'
                          for x, y in places]
    picture.legend([(name, color) for (name, _), color in zip(series, COLORS)])
    return picture.done()


def bars(title, subtitle, x_label, groups, log=False, mark=None):
    """Horizontal bars. `groups`: (name, [(series, value)]); `mark`: (name, value) of a vertical
    line."""
    names = list(dict.fromkeys(series for _, values in groups for series, _ in values))
    thick, gap = 15, 12
    rows = sum(thick * len(values) + gap for _, values in groups)
    picture = Picture(title, subtitle, TOP + rows + 6 + BOTTOM,
                      left=30 + round(6.7 * max(len(name) for name, _ in groups)))
    values = [value for _, group in groups for _, value in group]
    across = Axis(x_label, values + ([mark[1]] if mark else []), log)
    if not log:
        across.high += (across.ticks[1] - across.ticks[0]) * 0.6  # room for the last number
    picture.draw_x(across)
    picture.frame()
    if mark:
        x = picture.x(across, mark[1])
        picture.parts.append(line(x, TOP, x, picture.height - BOTTOM, MARK, 1.5, "6 4"))
    y = TOP + gap / 2
    for name, group in groups:
        picture.parts.append(
            text(picture.left - 8, y + thick * len(group) / 2 + 4, name, "end", 12))
        for series, value in group:
            end = picture.x(across, value)
            color = COLORS[names.index(series)]
            picture.parts += [f'<rect x="{picture.left}" y="{y:.1f}" '
                              f'width="{max(end - picture.left, 1):.1f}" height="{thick - 2}" '
                              f'fill="{color}"/>',
                              text(max(end, picture.left) + 4, y + thick - 4.5, number(value),
                                   size=11, color="#444444",
                                   halo=True)]
            y += thick
        y += gap
    picture.legend([(name, COLORS[i]) for i, name in enumerate(names) if len(names) > 1],
                   mark[0] if mark else None)
    return picture.done()


def points(title, subtitle, x_label, y_label, named, low=(None, None)):
    """Labelled points: `named` is [(name, x, y)]."""
    picture = Picture(title, subtitle)
    across = Axis(x_label, [x for _, x, _ in named], low=low[0])
    up = Axis(y_label, [y for _, _, y in named], low=low[1])
    picture.draw_x(across)
    picture.draw_y(up)
    picture.frame()
    taken = []
    for name, x, y in sorted(named, key=lambda each: -each[2]):
        px, py = picture.x(across, x), picture.y(up, y)
        wide = 6.6 * len(name)
        to_left = px + 9 + wide > WIDTH - RIGHT
        begin, height = (px - 9 - wide if to_left else px + 9), py + 4
        while any(abs(height - other) < 14 and begin < last and begin + wide > first
                  for first, last, other in taken):
            height += 3  # below the labels that are there
        taken.append((begin, begin + wide, height))
        if abs(height - py - 4) > 4:
            picture.parts.append(line(px, py, px - 6 if to_left else px + 7, height - 4, "#999999"))
        picture.parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4.5" fill="{COLORS[0]}"/>',
                          text(px - 9 if to_left else px + 9, height, name,
                               "end" if to_left else "start", 12)]
    return picture.done()
