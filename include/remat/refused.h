#pragma once
// Reasons why a call cannot be a region, as types whose names the compiler prints in its first
// line.

#include <cstdint>
#include <type_traits>
#include <utility>

#include "remat/call.h"
#include "remat/options.h"

namespace torch::jit {
struct Function;
}

namespace remat {

/// Reasons why a call is refused. They are template arguments of the deleted overloads, and
/// compilers print them.
namespace not_a_region {
struct a_parameter_is_a_non_const_reference__take_it_by_value_or_const_reference {};
struct an_argument_is_missing {};
struct an_argument_is_missing__function_pointers_have_no_default_arguments {};
struct there_are_more_arguments_than_parameters {};
struct an_argument_has_a_type_that_the_function_does_not_take {};
struct the_base_class_Module_has_no_forward__pass_a_pointer_to_the_modules_own_type {};
struct the_function_is_a_module_by_value__pass_its_holder_or_a_pointer_to_it {};
struct the_module_has_no_forward {};
struct forward_is_private_or_none_of_its_overloads_takes_these_arguments {};
struct a_function_of_TorchScript_without_a_module__call_it_in_a_lambda {};
struct an_argument_of_a_script_module_is_nothing_that_an_IValue_can_hold {};
struct the_function_cannot_be_called_with_copies_of_these_arguments {};
}  // namespace not_a_region

namespace detail {

template <int64_t n>
using Count = std::integral_constant<int64_t, n>;
template <class R, class... P>
Count<sizeof...(P)> num_parameters(R (*)(P...));
template <class R, class C, class... P>
Count<sizeof...(P)> num_parameters(R (C::*)(P...));
template <class R, class C, class... P>
Count<sizeof...(P)> num_parameters(R (C::*)(P...) const);

/// A second `forward`: a base class with a member of that name, of any access, makes the name
/// ambiguous.
struct NamesForward {
  int forward;
};
template <class M>
struct AlsoForward : M, NamesForward {};
template <class M>
constexpr bool has_forward() {
  if constexpr (std::is_final_v<M>)
    return true;
  else
    return !requires { &AlsoForward<M>::forward; };
}

template <class Function, class... A>
constexpr auto cause_by_number() {
  if constexpr (requires { num_parameters(std::declval<Function>()); }) {
    constexpr int64_t wanted = decltype(num_parameters(std::declval<Function>()))::value;
    constexpr int64_t given = sizeof...(A);
    if constexpr (given < wanted && std::is_pointer_v<Function>)
      return not_a_region::an_argument_is_missing__function_pointers_have_no_default_arguments{};
    else if constexpr (given < wanted)
      return not_a_region::an_argument_is_missing{};
    else if constexpr (given > wanted)
      return not_a_region::there_are_more_arguments_than_parameters{};
    else
      return not_a_region::an_argument_has_a_type_that_the_function_does_not_take{};
  } else {
    return not_a_region::the_function_cannot_be_called_with_copies_of_these_arguments{};
  }
}

/// Returns the reason why `F` does not accept the arguments `A`, in the types in which they are
/// kept; void if it accepts them.
template <class F, class... A>
constexpr auto cause_of() {
  if constexpr (RunnableAs<F, A...> || std::is_same_v<F, CheckpointOptions>) {
    return;
  } else if constexpr (IsModule<F>) {
    return not_a_region::the_function_is_a_module_by_value__pass_its_holder_or_a_pointer_to_it{};
  } else if constexpr (IsModulePointer<F> || OwnsModule<F>) {
    using M = std::remove_cvref_t<decltype(*std::declval<F&>())>;
    if constexpr (std::is_same_v<M, torch::nn::Module>)
      return not_a_region::
          the_base_class_Module_has_no_forward__pass_a_pointer_to_the_modules_own_type{};
    else if constexpr (HasForward<F&, A&...>)
      return not_a_region::
          a_parameter_is_a_non_const_reference__take_it_by_value_or_const_reference{};
    else if constexpr (!has_forward<M>())
      return not_a_region::the_module_has_no_forward{};
    else if constexpr (requires { &M::forward; })
      return cause_by_number<decltype(&M::forward), A...>();
    else
      return not_a_region::forward_is_private_or_none_of_its_overloads_takes_these_arguments{};
  } else if constexpr (IsScript<F>) {
    return not_a_region::an_argument_of_a_script_module_is_nothing_that_an_IValue_can_hold{};
  } else if constexpr (std::is_convertible_v<F, const torch::jit::Function*>) {
    return not_a_region::a_function_of_TorchScript_without_a_module__call_it_in_a_lambda{};
  } else if constexpr (std::is_invocable_v<F&, A&...>) {
    return not_a_region::
        a_parameter_is_a_non_const_reference__take_it_by_value_or_const_reference{};
  } else if constexpr (std::is_pointer_v<F>) {
    return cause_by_number<F, A...>();
  } else if constexpr (requires { &F::operator(); }) {
    return cause_by_number<decltype(&F::operator()), A...>();
  } else {
    return not_a_region::the_function_cannot_be_called_with_copies_of_these_arguments{};
  }
}

/// The reason for a call with arguments as written; void if the call can be a region.
template <class F, class... A>
using CauseOf = decltype(cause_of<std::decay_t<F>, Owned<A>...>());

template <class Cause>
concept IsRefused = !std::is_void_v<Cause>;

}  // namespace detail
}  // namespace remat
