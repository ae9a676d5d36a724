// The binding of layouts, and the names of types.
#include <algorithm>

#include "bind.h"
#include "lines/native/layout.h"

namespace tierbed {

FloatType type_named(const std::string& dtype) {
    const char* names[FLOAT_TYPES] = {"float32", "float16", "bfloat16"};
    const auto type = std::find(names, names + FLOAT_TYPES, dtype) - names;
    require(type < FLOAT_TYPES, "dtype must be float32, float16 or bfloat16");
    return static_cast<FloatType>(type);
}

void bind_layout(nb::module_& m) {
    nb::class_<Layout>(m, "Layout")
        .def(
            "__init__",
            [](Layout* self, u32 dim, std::vector<float> states, std::vector<u32> state_widths, u64 seed,
               std::vector<u32> columns, std::vector<u32> kinds, In<float, nb::shape<-1, 2>> parameters,
               In<double, nb::shape<-1, 2>> quantiles, const std::string& dtype, const std::string& state_dtype,
               u32 narrow_states) {
                require(states.size() == state_widths.size(), "states and state_widths differ in length");
                require(kinds.size() == parameters.shape(0) && kinds.size() == quantiles.shape(0),
                        "kinds, parameters and quantiles differ in length");
                require(!columns.empty() && !kinds.empty() && kinds.size() % columns.size() == 0,
                        "one entry for each table and column group");
                std::size_t total = 0;
                for (const u32 c : columns) total += c;
                require(dim > 0 && total == dim, "columns must sum to dim");
                std::size_t width = dim;
                for (const u32 w : state_widths) width += w;
                require(width <= std::size_t{1} << 28, "a line of over 2^28 floats");
                const std::pair types{type_named(dtype), type_named(state_dtype)};
                require((narrow_states > 0) == (types.second != FloatType::float32) &&
                            narrow_states <= state_widths.size(),
                        "narrow_states are states of 16 bits");
                for (u32 k = 0; k < narrow_states; ++k)
                    require(state_widths[k] == dim, "a narrow state has dim numbers");
                std::vector<InitialValues> values;
                for (std::size_t i = 0; i < kinds.size(); ++i) {
                    require(kinds[i] <= 2, "kinds are 0, 1, 2");
                    values.push_back({static_cast<Initial>(kinds[i]), parameters(i, 0), parameters(i, 1),
                                      quantiles(i, 0), quantiles(i, 1)});
                }
                new (self) Layout(dim, std::move(states), state_widths, seed, columns, std::move(values), types,
                                  narrow_states);
            },
            nb::arg("dim"), nb::arg("states"), nb::arg("state_widths"), nb::arg("seed"), nb::arg("columns"),
            nb::arg("kinds"), nb::arg("parameters"), nb::arg("quantiles"), nb::arg("dtype") = "float32",
            nb::arg("state_dtype") = "float32", nb::arg("narrow_states") = 0)
        .def_prop_ro("dim", [](const Layout& l) { return l.shape.dim; })
        .def_prop_ro("width", [](const Layout& l) { return l.shape.width; })
        .def_prop_ro("line_bytes", [](const Layout& l) { return l.shape.line_bytes; });
}

}  // namespace tierbed
