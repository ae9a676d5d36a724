// Python bindings of layouts, batches, hashes and a step's ops.
#include <algorithm>

#include "batch.h"
#include "bind.h"
#include "layout.h"
#include "instruction_sets.h"
#include "parse_lookup.h"
#include "step.h"
#include "thread_pool.h"

namespace tierbed {

LookupArrays parse_lookup(const nb::tuple& lookup, std::vector<nb::object>* keep_alive) {
    const auto array = [&](auto values) {
        if (keep_alive) keep_alive->push_back(nb::cast(values));
        return values;
    };
    const auto keys = array(require_type<InVector<u64>>(lookup[0], "keys must be contiguous uint64"));
    LookupArrays arrays{keys.data(), nullptr, keys.size(), keys.size(), {}, 0, false};
    if (nb::isinstance<nb::int_>(lookup[2])) {
        const auto length = nb::cast<std::size_t>(lookup[2]);
        arrays.is_pooled = true;
        arrays.bags.length = length;
        require(length > 0 ? keys.size() % length == 0 : keys.size() == 0, "bags differ in length");
        arrays.num_bags = length > 0 ? keys.size() / length : 0;
    } else if (!lookup[2].is_none()) {
        const auto offsets = array(require_type<InVector<i64>>(lookup[2], "offsets must be contiguous int64"));
        require(offsets.size() > 0 && offsets.data()[0] == 0 &&
                    offsets.data()[offsets.size() - 1] == static_cast<i64>(keys.size()) &&
                    std::is_sorted(offsets.data(), offsets.data() + offsets.size()),
                "offsets must ascend from 0 to the number of keys");
        arrays.is_pooled = true;
        arrays.bags.offsets = offsets.data();
        arrays.num_bags = arrays.num_offset_bags = offsets.size() - 1;
    }
    if (lookup.size() > 3) {
        const auto features = array(require_type<InVector<u32>>(lookup[3], "features must be contiguous uint32"));
        const auto batch = nb::cast<std::size_t>(lookup[4]);
        require(arrays.bags.offsets && !lookup[1].is_none(), "features need offsets and table ids");
        std::vector<bool> seen(batch > 0 ? arrays.num_offset_bags / batch : 0);
        for (std::size_t i = 0; i < features.size(); ++i) {
            const u32 feature = features.data()[i];
            require(batch == 0 || (feature < seen.size() && !seen[feature]), "give each feature once, with offsets");
            if (batch > 0) seen[feature] = true;
        }
        arrays.bags.features = features.data();
        arrays.bags.num_columns = static_cast<u32>(features.size());
        arrays.bags.batch_size = static_cast<u32>(batch);
        arrays.num_bags = features.size() * batch;
    }
    if (!lookup[1].is_none()) {
        const auto tables = array(require_type<InVector<u32>>(lookup[1], "table ids must be contiguous uint32"));
        const std::size_t num_tables = arrays.bags.features ? arrays.bags.num_columns : arrays.num_bags;
        require(tables.size() == num_tables, "give one table id for each bag, or for each feature");
        arrays.tables = tables.data();
    }
    return arrays;
}

namespace {

// Returns a NumPy view of a batch's Buffer, read-only if the Buffer is const.
template <class Values>
auto as_view(Values& values) {
    return Array<std::remove_pointer_t<decltype(values.data())>>(values.data(), {values.size()});
}

u64* require_counts(const Layout& layout, std::optional<OutVector<u64>>& counts) {
    require(!counts || counts->size() == layout.num_tables, "first_write_counts must be [tables]");
    return counts ? counts->data() : nullptr;
}

void bind_batch(nb::module_& m) {
    nb::class_<Batch>(m, "Batch")
        .def(
            "__init__",
            [](Batch* self, nb::sequence lookups, u32 num_tables, std::optional<u64> padding,
               std::optional<InVector<u64>> max_ids, std::vector<bool> drops_illegal) {
                std::vector<nb::object> keep_alive;
                std::vector<LookupArrays> views;
                for (nb::handle item : lookups) views.push_back(parse_lookup(nb::cast<nb::tuple>(item), &keep_alive));
                require(num_tables > 0, "num_tables must be positive");
                LegalIds legal;
                if (max_ids) {
                    if (drops_illegal.empty()) drops_illegal.resize(num_tables);
                    legal = {{max_ids->data(), max_ids->data() + max_ids->size()}, std::move(drops_illegal)};
                    require(legal.max_ids.size() == num_tables && legal.drops_illegal.size() == num_tables,
                            "max_ids and drops_illegal must be [num_tables]");
                }
                nb::gil_scoped_release unlocked;
                new (self) Batch(std::make_shared<const UniqueRows>(views, num_tables, padding, legal));
            },
            "lookups"_a, "num_tables"_a, "padding"_a.none(), "max_ids"_a.none() = nb::none(),
            "drops_illegal"_a = std::vector<bool>{})
        .def(
            "make_sibling", [](const Batch& batch) { return new Batch(batch.shared()); }, Unlocked())
        .def_ro("num_positions", &Batch::num_positions)
        .def_ro("num_output_rows", &Batch::num_output_rows)
        .def_ro("num_unique", &Batch::num_unique)
        .def_prop_ro("dropped_counts", [](const Batch& batch) { return batch.shared()->dropped_counts; })
        .def_prop_ro("first_illegal_id", [](const Batch& batch) { return batch.shared()->first_illegal_id; })
        .def_prop_ro("keys", [](Batch& batch) { return as_view(batch.keys()); })
        .def_prop_ro("tables", [](const Batch& batch) { return as_view(batch.tables); })
        .def_prop_ro("lines", [](Batch& batch) { return as_view(batch.lines); })
        .def_prop_ro("lookup_lines",
                     [](Batch& batch) { return as_view(batch.lookup_lines.size() ? batch.lookup_lines : batch.lines); })
        .def_prop_ro("inverse", [](const Batch& batch) { return as_view(batch.inverse); })
        .def_prop_ro("occurrences", [](const Batch& batch) { return as_view(batch.occurrences); })
        .def_prop_ro("occurrence_offsets", [](const Batch& batch) { return as_view(batch.occurrence_offsets); })
        .def_prop_ro("refused_lines", [](Batch& batch) { return as_view(batch.refused_lines); });
}

using InRows = Exact<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutRows = Exact<nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Pooling make_pooling(const Batch& batch, std::size_t lookup, bool mean, const std::optional<InVector<float>>& weights,
                     const std::string& dtype) {
    require(lookup < batch.lookups.size(), "the batch has no such lookup");
    const LookupArrays& arrays = batch.lookups[lookup].arrays;
    require(arrays.is_pooled || (!mean && !weights), "mean and weights are for bags");
    require(!weights || weights->size() == arrays.num_ids, "weights must be [positions]");
    return {mean, weights ? weights->data() : nullptr, parse_float_type(dtype)};
}

// Checks that `rows` is [output rows, dim], and that its dtype is float32, or uint16 for an output type of 16 bits.
template <class RowSpan>
void require_outputs(const Batch& batch, const Layout& layout, std::size_t lookup, const RowSpan& rows,
                     const Pooling& pooling) {
    require(rows.dtype() == (pooling.output_type == FloatType::float32 ? nb::dtype<float>() : nb::dtype<u16>()),
            "rows must be float32, or uint16 if dtype has 16 bits");
    require(rows.shape(0) == batch.lookups[lookup].arrays.num_bags && rows.shape(1) == layout.shape.dim,
            "rows must be [output rows, dim]");
}

// Parses each lookup's gradient, and keeps the gradients' arrays alive.
struct LookupGradients {
    std::vector<nb::object> keep_alive;
    std::vector<LookupGradient> gradients;

    LookupGradients(const Batch& batch, const Layout& layout, const nb::list& grads, const std::vector<bool>& means,
                    const nb::list& weights, const std::string& dtype) {
        require(grads.size() == batch.lookups.size() && means.size() == grads.size() && weights.size() == grads.size(),
                "grads, means and weights must have one entry for each lookup");
        for (std::size_t k = 0; k < grads.size(); ++k) {
            const auto rows = require_type<InRows>(grads[k], "gradients must be contiguous");
            std::optional<InVector<float>> scale;
            if (!weights[k].is_none())
                scale = require_type<InVector<float>>(weights[k], "weights must be contiguous float32");
            const Pooling pooling = make_pooling(batch, k, means[k], scale, dtype);
            require_outputs(batch, layout, k, rows, pooling);
            keep_alive.push_back(nb::cast(rows));
            if (scale) keep_alive.push_back(nb::cast(*scale));
            gradients.push_back({rows.data(), pooling});
        }
    }
};

// Checks that each unique row has an index below `rows`. Without `indices`, the batch must have `rows` unique rows.
void require_indices(const Batch& batch, const std::optional<InVector<i64>>& indices, std::size_t rows) {
    require(indices ? indices->size() == batch.num_unique : rows == batch.num_unique, "give one index per row");
    for (std::size_t row = 0; indices && row < batch.num_unique; ++row)
        require(static_cast<u64>(indices->data()[row]) < rows, "an index is out of range");
}

void bind_step(nb::module_& m) {
    m.def(
        "copy_lines",
        [](const Layout& layout, InVector<u64> from, InVector<u64> to) {
            require_one_length(from, to);
            parallel_ranges(from.size(), 512, [&](std::size_t begin, std::size_t end) {
                for (std::size_t i = begin; i < end; ++i) copy_line(THREAD, to.data()[i], from.data()[i], layout.shape);
            });
        },
        "layout"_a, "source"_a, "to"_a, Unlocked());
    m.def("initialise_missing", &initialise_missing, Unlocked());
    m.def(
        "gather",
        [](const Batch& batch, const Layout& layout, std::size_t lookup, OutRows out, bool mean,
           std::optional<InVector<float>> weights, const std::string& dtype) {
            const Pooling pooling = make_pooling(batch, lookup, mean, weights, dtype);
            require_outputs(batch, layout, lookup, out, pooling);
            gather(batch, layout, lookup, pooling, out.data());
        },
        "batch"_a, "layout"_a, "lookup"_a, "out"_a, "mean"_a = false, "weights"_a.none() = nb::none(),
        "dtype"_a = "float32", Unlocked());
    m.def(
        "compute_weights_grad",
        [](const Batch& batch, const Layout& layout, std::size_t lookup, InRows grads, OutVector<float> out, bool mean,
           const std::string& dtype) {
            const Pooling pooling = make_pooling(batch, lookup, mean, std::nullopt, dtype);
            require_outputs(batch, layout, lookup, grads, pooling);
            require(out.size() == batch.lookups[lookup].arrays.num_ids, "out must be [positions]");
            compute_weights_grad(batch, layout, lookup, pooling, grads.data(), out.data());
        },
        "batch"_a, "layout"_a, "lookup"_a, "grads"_a, "out"_a, "mean"_a = false, "dtype"_a = "float32", Unlocked());
    m.def(
        "update",
        [](Batch& batch, const Layout& layout, nb::list grads, std::vector<bool> means, nb::list weights,
           const std::string& rule, std::vector<double> hyperparams, u32 step, const std::string& dtype, float scale,
           std::optional<OutVector<u64>> first_write_counts) {
            u64* const counts = require_counts(layout, first_write_counts);
            const LookupGradients gradients(batch, layout, grads, means, weights, dtype);
            const BoundRule bound(layout, rule, std::move(hyperparams));
            nb::gil_scoped_release unlocked;
            return update(batch, layout, gradients.gradients, bound, step, scale, counts);
        },
        "batch"_a, "layout"_a, "grads"_a, "means"_a, "weights"_a, "rule"_a, "hyperparams"_a, "step"_a,
        "dtype"_a = "float32", "scale"_a = 1.0f, "first_write_counts"_a.none() = nb::none());
    m.def(
        "compute_squared_norms",
        [](const Batch& batch, const Layout& layout, nb::list grads, std::vector<bool> means, nb::list weights,
           const std::string& dtype) {
            const LookupGradients gradients(batch, layout, grads, means, weights, dtype);
            Buffer<float> squares(batch.num_unique);
            without_gil([&] { compute_squared_norms(batch, layout.shape.dim, gradients.gradients, squares.data()); });
            return to_numpy(std::move(squares));
        },
        "batch"_a, "layout"_a, "grads"_a, "means"_a, "weights"_a, "dtype"_a = "float32");
    m.def(
        "sum_gradients",
        [](const Batch& batch, const Layout& layout, nb::list grads, std::vector<bool> means, nb::list weights,
           Out<float, nb::ndim<2>> out, std::optional<InVector<i64>> indices, const std::string& dtype) {
            const LookupGradients gradients(batch, layout, grads, means, weights, dtype);
            require(out.shape(1) == layout.shape.dim, "out must be [*, dim]");
            require_indices(batch, indices, out.shape(0));
            nb::gil_scoped_release unlocked;
            sum_gradients(batch, layout.shape.dim, gradients.gradients, indices ? indices->data() : nullptr,
                          out.data());
        },
        "batch"_a, "layout"_a, "grads"_a, "means"_a, "weights"_a, "out"_a, "indices"_a.none() = nb::none(),
        "dtype"_a = "float32");
    // Sets the line of each unique row u to rows[i], where i is indices[u]. If i is at least len(rows), row u gets a
    // line of the batch `other` instead: the line that lookups read at position begin + i - len(rows).
    m.def(
        "set_lookup_rows",
        [](Batch& batch, const Layout& layout, In<float, nb::ndim<2>> rows, InVector<i64> indices, const Batch* other,
           std::size_t begin) {
            require(rows.shape(1) == layout.shape.dim, "rows must be [*, dim]");
            require(!other || begin <= other->num_positions, "begin must be a position of the batch or its end");
            const std::size_t count = rows.shape(0);
            require_indices(batch, indices, count + (other ? other->num_positions - begin : 0));
            const Batch& source = other ? *other : batch;
            const Buffer<u64>& source_lines = source.lookup_lines.size() ? source.lookup_lines : source.lines;
            const bool has_16bit_embedding = layout.shape.embedding != FloatType::float32;
            std::vector<std::size_t> from_other;
            for (std::size_t row = 0; row < batch.num_unique; ++row) {
                const std::size_t index = static_cast<std::size_t>(indices.data()[row]);
                if (index >= count) {
                    const i32 source_row = source.inverse[begin + index - count];
                    require(source_row >= 0, "an index refers to padding");
                    batch.lines[row] = source_lines[source_row];
                    if (has_16bit_embedding) from_other.push_back(row);
                } else {
                    batch.lines[row] = reinterpret_cast<u64>(rows.data() + index * rows.shape(1));
                }
            }
            if (has_16bit_embedding) use_float32_lines(batch, layout, from_other);
        },
        "batch"_a, "layout"_a, "rows"_a, "indices"_a, "other"_a.none() = nb::none(), "begin"_a = 0,
        nb::keep_alive<1, 3>());
    m.def(
        "preview_catch_up",
        [](Batch& batch, const Layout& layout, const std::string& rule, std::vector<double> hyperparams, u32 step) {
            preview_catch_up(batch, layout, BoundRule(layout, rule, std::move(hyperparams)), step);
        },
        "batch"_a, "layout"_a, "rule"_a, "hyperparams"_a, "step"_a, Unlocked());
    m.def(
        "catch_up",
        [](const Layout& layout, InVector<u64> lines, const std::string& rule, std::vector<double> values, u32 step) {
            catch_up(layout, lines.data(), lines.size(), BoundRule(layout, rule, std::move(values)), step);
        },
        "layout"_a, "lines"_a, "rule"_a, "hyperparams"_a, "step"_a, Unlocked());
    m.def(
        "assign",
        [](Batch& batch, const Layout& layout, In<float, nb::ndim<2>> values, u32 step,
           std::optional<OutVector<u64>> first_write_counts) {
            require(values.shape(0) == batch.num_positions && values.shape(1) == layout.shape.dim,
                    "values must be [batch.num_positions, dim]");
            return assign(batch, layout, values.data(), step, require_counts(layout, first_write_counts));
        },
        "batch"_a, "layout"_a, "values"_a, "step"_a, "first_write_counts"_a.none() = nb::none(), Unlocked());
    m.def("count_new_rows", &count_new_rows, Unlocked());
    m.def("count_written", [](const Batch& batch, const Layout& layout) {
        std::vector<u64> row_counts(layout.num_tables);
        without_gil([&] { count_written(batch, layout, row_counts.data()); });
        return to_numpy(std::move(row_counts));
    });
}

// In `kinds`, `parameters` (a, b) and `quantiles` (q0, q1), entry t * columns + c is for table t's column group c.
void bind_layout(nb::module_& m) {
    nb::class_<Layout>(m, "Layout")
        .def(
            "__init__",
            [](Layout* self, u32 dim, std::vector<float> states, std::vector<u32> state_widths, u64 seed,
               std::vector<u32> columns, std::vector<u32> kinds, In<float, nb::shape<-1, 2>> parameters,
               In<double, nb::shape<-1, 2>> quantiles, const std::string& dtype, const std::string& state_dtype,
               u32 num_16bit_states, std::optional<u64> zero_key, std::optional<std::vector<u64>> max_ids) {
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
                require(width <= std::size_t{1} << 28, "a line has more than 2^28 words");
                const std::pair types{parse_float_type(dtype), parse_float_type(state_dtype)};
                require((num_16bit_states > 0) == (types.second != FloatType::float32),
                        "give num_16bit_states if and only if state_dtype has 16 bits");
                require(num_16bit_states <= state_widths.size(), "num_16bit_states exceeds the number of states");
                for (u32 k = 0; k < num_16bit_states; ++k)
                    require(state_widths[k] == dim, "a 16-bit state must have dim numbers");
                std::vector<InitialValues> values;
                for (std::size_t i = 0; i < kinds.size(); ++i) {
                    require(kinds[i] <= 2, "kinds are 0, 1, 2");
                    values.push_back({static_cast<Initial>(kinds[i]), parameters(i, 0), parameters(i, 1),
                                      quantiles(i, 0), quantiles(i, 1)});
                }
                require(!max_ids || max_ids->size() * columns.size() == kinds.size(), "max_ids must be [tables]");
                new (self) Layout(dim, std::move(states), state_widths, seed, columns, std::move(values), types,
                                  num_16bit_states, max_ids ? IdLinearizer(*max_ids) : IdLinearizer(), zero_key);
            },
            "dim"_a, "states"_a, "state_widths"_a, "seed"_a, "columns"_a, "kinds"_a, "parameters"_a, "quantiles"_a,
            "dtype"_a = "float32", "state_dtype"_a = "float32", "num_16bit_states"_a = 0,
            "zero_key"_a.none() = nb::none(), "max_ids"_a.none() = nb::none())
        .def_prop_ro("dim", [](const Layout& l) { return l.shape.dim; })
        .def_prop_ro("width", [](const Layout& l) { return l.shape.width; })
        .def_prop_ro("line_bytes", [](const Layout& l) { return l.shape.line_bytes; });
}

// Calls `map` with each row key's `hash_row`, and returns the results.
template <class T, class Map>
Array<T> map_hashes(const InVector<u32>& tables, const InVector<u64>& keys, const Map& map) {
    require_one_length(tables, keys);
    Buffer<T> all(keys.size());
    for (std::size_t i = 0; i < all.size(); ++i)
        all[i] = static_cast<T>(map(hash_row(tables.data()[i], keys.data()[i])));
    return to_numpy(std::move(all));
}

void bind_hashes(nb::module_& m) {
    m.def("slot_hash", [] {
        const SlotHash& h = slot_hash;
        return to_numpy(
            std::vector<u64>{h.addend, h.table_factor, h.factor[0], h.factor[1], h.inverse[0], h.inverse[1]});
    });
    m.def(
        "buckets", [](InVector<u32> tables, InVector<u64> keys) { return map_hashes<u8>(tables, keys, get_bucket); },
        "tables"_a, "keys"_a);
    m.def(
        "find_owners",
        [](InVector<u32> tables, InVector<u64> keys, u32 ranks) {
            require(0 < ranks && ranks <= MAX_RANKS, "ranks must lie between 1 and 1024");
            return map_hashes<u16>(tables, keys, [&](u64 hash) { return find_owner(hash, ranks); });
        },
        "tables"_a, "keys"_a, "ranks"_a);
}

}  // namespace

void bind_ops(nb::module_& m) {
    m.def("set_num_threads", &set_num_threads);
    m.def("list_instruction_sets", &list_instruction_sets);
    m.def("use_instruction_set", &use_instruction_set, "name"_a);
    m.def("scratch", [](std::size_t bytes) { return to_numpy(Buffer<u8>(bytes)); });
    m.def("normal_quantile", [](double p) {
        require(p > 0.0 && p < 1.0, "p must lie between 0 and 1");
        return normal_quantile(p);
    });
    bind_layout(m);
    bind_batch(m);
    bind_hashes(m);
    bind_step(m);
}

FloatType parse_float_type(const std::string& dtype) {
    const char* names[FLOAT_TYPES] = {"float32", "float16", "bfloat16"};
    const auto type = std::find(names, names + FLOAT_TYPES, dtype) - names;
    require(type < FLOAT_TYPES, "dtype must be float32, float16 or bfloat16");
    return static_cast<FloatType>(type);
}

}  // namespace tierbed
