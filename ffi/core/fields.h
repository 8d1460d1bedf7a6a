// The fields of a problem or a configuration, by name. A struct declares them once,
//
//     template <class Self, class Visit>
//     static void fields(Self& self, Visit&& visit) {
//       visit("dtype", self.dtype);
//       visit("columns", self.columns); ...
//     }
//
// which defines the problem that Python passes, the configuration that Python gets of a plan, the
// records that tests compare, and the key by which handlers cache plans.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/dtype.h"

namespace JAX_GPUOPS_NAMESPACE {

// Named values, as Python has them in a dict.
class Fields {
 public:
  using Integers = std::vector<std::int64_t>;
  using Value = std::variant<std::int64_t, std::string, Integers>;

  void set(std::string_view name, Value value) { values_[std::string(name)] = std::move(value); }

  template <class T>
  const T& get(std::string_view name) const {
    const auto found = values_.find(name);
    if (found == values_.end()) {
      throw std::invalid_argument("the problem has no field " + std::string(name));
    }
    if (const T* value = std::get_if<T>(&found->second)) return *value;
    throw std::invalid_argument("the problem's " + std::string(name) + " has the wrong type");
  }
  std::int64_t integer(std::string_view name) const { return get<std::int64_t>(name); }
  const Integers& integers(std::string_view name) const { return get<Integers>(name); }
  const std::string& text(std::string_view name) const { return get<std::string>(name); }

  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

 private:
  std::map<std::string, Value, std::less<>> values_;
};

// The value of an enumeration from its name. An enumeration that is a field gives its names, in the
// order of its values, by an overload in its own namespace: `constexpr auto& names_of(Function) {
// return kNames; }`.
template <class Enum>
Enum enum_from_name(std::string_view name) {
  const auto& names = names_of(Enum{});
  for (std::size_t i = 0; i < std::size(names); ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  throw std::invalid_argument("'" + std::string(name) + "' is not a value of its field");
}

inline void read_field(const Fields& fields, std::string_view name, DType& value) {
  value = dtype_from_name(fields.text(name));
}
inline void read_field(const Fields& fields, std::string_view name, Fields::Integers& value) {
  value = fields.integers(name);
}
template <class T>
void read_field(const Fields& fields, std::string_view name, T& value) {
  if constexpr (std::is_enum_v<T>) {
    value = enum_from_name<T>(fields.text(name));
  } else {
    value = static_cast<T>(fields.integer(name));
  }
}

template <class T>
Fields::Value field_value(const T& value) {
  if constexpr (std::is_same_v<T, DType>) {
    return std::string(info(value).name);
  } else if constexpr (std::is_enum_v<T>) {
    return std::string(names_of(value)[static_cast<std::size_t>(value)]);
  } else if constexpr (std::is_same_v<T, Fields::Integers>) {
    return value;
  } else {
    return static_cast<std::int64_t>(value);
  }
}

template <class Struct>
Struct from_fields(const Fields& fields) {
  Struct result{};
  Struct::fields(result,
                 [&](std::string_view name, auto& value) { read_field(fields, name, value); });
  return result;
}

template <class Struct>
Fields to_fields(const Struct& value) {
  Fields result;
  Struct::fields(value, [&](std::string_view name, const auto& field) {
    result.set(name, field_value(field));
  });
  return result;
}

// Appends the bytes of a field, or of all fields of a struct. Structs that differ append different
// bytes.
template <class T>
void append_field(std::string& bytes, const T& value) {
  const auto append = [&](std::int64_t integer) {
    bytes.append(reinterpret_cast<const char*>(&integer), sizeof integer);
  };
  if constexpr (std::is_same_v<T, Fields::Integers>) {
    append(static_cast<std::int64_t>(value.size()));
    for (const std::int64_t integer : value) append(integer);
  } else {
    append(static_cast<std::int64_t>(value));
  }
}

template <class Struct>
void append_fields(std::string& bytes, const Struct& value) {
  Struct::fields(value, [&](std::string_view, const auto& field) { append_field(bytes, field); });
}

}  // namespace JAX_GPUOPS_NAMESPACE
