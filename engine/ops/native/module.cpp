// The Python binding: engine/_core.pyi is its contract. Every loop runs without the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cache.h"
#include "full_table.h"
#include "packed_row.h"
#include "pool.h"
#include "step.h"
#ifdef TIERBED_ROCKSDB
#include "rocksdb_tier.h"
#endif

namespace nb = nanobind;
using namespace tierbed;

namespace {

template <class T, class... Shape>
using In = nb::ndarray<const T, nb::c_contig, nb::device::cpu, Shape...>;
template <class T, class... Shape>
using Out = nb::ndarray<T, nb::c_contig, nb::device::cpu, Shape...>;
template <class T>
using InVector = In<T, nb::ndim<1>>;
template <class T>
using OutVector = Out<T, nb::ndim<1>>;
template <class T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

template <class T>
Array<T> own(std::vector<T>&& values) {
    auto* kept = new std::vector<T>(std::move(values));
    kept->reserve(1);  // NumPy wants an address even for no elements
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Array<T>(kept->data(), {kept->size()}, owner);
}

template <class T>
Array<T> view(std::vector<T>& values, nb::handle owner) {
    values.reserve(1);
    return Array<T>(values.data(), {values.size()}, owner);
}

// flags of n rows, filled by body without the interpreter lock
template <class Body>
nb::ndarray<nb::numpy, bool, nb::ndim<1>> flags(std::size_t n, const Body& body) {
    auto* values = new bool[n + 1]();
    nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<bool*>(p); });
    {
        nb::gil_scoped_release unlocked;
        body(values);
    }
    return {values, {n}, owner};
}

template <class T>
Array<bool> read_rows(T& tier, InVector<u32> tables, InVector<u64> keys, InVector<u64> lines) {
    require(tables.size() == keys.size() && keys.size() == lines.size(), "tables, keys and lines differ in length");
    return flags(keys.size(),
                 [&](bool* found) { tier.read(tables.data(), keys.data(), lines.data(), found, keys.size()); });
}

template <class T>
void write_rows(T& tier, InVector<u32> tables, InVector<u64> keys, InVector<u64> lines) {
    require(tables.size() == keys.size() && keys.size() == lines.size(), "tables, keys and lines differ in length");
    nb::gil_scoped_release unlocked;
    tier.write(tables.data(), keys.data(), lines.data(), keys.size());
}

using PySegment = std::tuple<InVector<u64>, std::optional<InVector<u32>>>;

void bind_batch(nb::module_& m) {
    nb::class_<Batch>(m, "Batch")
        .def(
            "__init__",
            [](Batch* self, nb::sequence segments, u32 num_tables, std::optional<u64> padding) {
                std::vector<Segment> views;
                std::vector<InVector<u64>> keys;
                std::vector<InVector<u32>> tables;
                for (nb::handle item : segments) {
                    auto segment = nb::cast<nb::tuple>(item);
                    keys.push_back(nb::cast<InVector<u64>>(segment[0]));
                    const u32* table_ids = nullptr;
                    if (!segment[1].is_none()) {
                        tables.push_back(nb::cast<InVector<u32>>(segment[1]));
                        require(tables.back().size() == keys.back().size(), "keys and table ids differ in length");
                        table_ids = tables.back().data();
                    }
                    views.push_back({keys.back().data(), table_ids, keys.back().size()});
                }
                require(num_tables > 0, "num_tables must be positive");
                nb::gil_scoped_release unlocked;
                new (self) Batch(views, num_tables, padding);
            },
            nb::arg("segments"), nb::arg("num_tables"), nb::arg("padding").none())
        .def_ro("size", &Batch::size)
        .def_prop_ro("unique", [](const Batch& b) { return b.keys.size(); })
        .def_prop_ro("keys", [](nb::handle_t<Batch> self) { return view(nb::cast<Batch&>(self).keys, self); })
        .def_prop_ro("tables", [](nb::handle_t<Batch> self) { return view(nb::cast<Batch&>(self).tables, self); })
        .def_prop_ro("lines", [](nb::handle_t<Batch> self) { return view(nb::cast<Batch&>(self).lines, self); })
        .def_prop_ro("inverse", [](nb::handle_t<Batch> self) { return view(nb::cast<Batch&>(self).inverse, self); })
        .def_prop_ro("occurrences",
                     [](nb::handle_t<Batch> self) { return view(nb::cast<Batch&>(self).occurrences, self); })
        .def_prop_ro("offsets", [](nb::handle_t<Batch> self) { return view(nb::cast<Batch&>(self).offsets, self); })
        .def("allocate",
             [](Batch& b, std::size_t n, const Layout& layout) { return own(b.allocate(n, layout.shape)); });
}

void bind_layout(nb::module_& m) {
    nb::class_<Layout>(m, "Layout")
        .def(
            "__init__",
            [](Layout* self, u32 dim, std::vector<float> states, u64 seed, std::vector<u32> columns,
               std::vector<u32> kinds, In<float, nb::shape<-1, 2>> parameters, In<double, nb::shape<-1, 2>> quantiles) {
                require(kinds.size() == parameters.shape(0) && kinds.size() == quantiles.shape(0),
                        "kinds, parameters and quantiles differ in length");
                require(!columns.empty() && !kinds.empty() && kinds.size() % columns.size() == 0,
                        "one entry for each table and column group");
                std::size_t total = 0;
                for (const u32 c : columns) total += c;
                require(dim > 0 && total == dim, "columns must sum to dim");
                std::vector<InitialValues> values;
                for (std::size_t i = 0; i < kinds.size(); ++i) {
                    require(kinds[i] <= 2, "kinds are 0, 1, 2");
                    values.push_back({static_cast<Initial>(kinds[i]), parameters(i, 0), parameters(i, 1),
                                      quantiles(i, 0), quantiles(i, 1)});
                }
                new (self) Layout(dim, std::move(states), seed, columns, std::move(values));
            },
            nb::arg("dim"), nb::arg("states"), nb::arg("seed"), nb::arg("columns"), nb::arg("kinds"),
            nb::arg("parameters"), nb::arg("quantiles"))
        .def_prop_ro("dim", [](const Layout& l) { return l.shape.dim; })
        .def_prop_ro("width", [](const Layout& l) { return l.shape.width; })
        .def_prop_ro("line_bytes", [](const Layout& l) { return l.shape.line_bytes; });
}

void bind_step(nb::module_& m) {
    m.def("initialise",
          [](const Layout& layout, InVector<u32> tables, InVector<u64> keys, Out<float, nb::ndim<2>> out) {
              const std::size_t n = keys.size();
              require(tables.size() == n && out.shape(0) == n && out.shape(1) == layout.shape.width,
                      "out must be [n, layout.width]");
              for (std::size_t i = 0; i < n; ++i) require(tables.data()[i] < layout.tables, "table id out of range");
              nb::gil_scoped_release unlocked;
              parallel_ranges(n, 256, [&](std::size_t begin, std::size_t end) {
                  std::vector<char> memory(layout.shape.line_bytes + 16);
                  const u64 line = (reinterpret_cast<u64>(memory.data()) + 15) / 16 * 16;
                  for (std::size_t i = begin; i < end; ++i) {
                      layout.initialise(line, tables.data()[i], keys.data()[i]);
                      std::copy_n(floats(line), layout.shape.width, out.data() + i * layout.shape.width);
                  }
              });
          });
    m.def("initialise_lines", [](const Layout& layout, InVector<u32> tables, InVector<u64> keys, InVector<u64> lines) {
        require(tables.size() == keys.size() && keys.size() == lines.size(), "tables, keys and lines differ in length");
        nb::gil_scoped_release unlocked;
        initialise_lines(layout, tables.data(), keys.data(), lines.data(), keys.size());
    });
    m.def("copy_lines", [](const Layout& layout, InVector<u64> from, InVector<u64> to) {
        require(from.size() == to.size(), "from and to differ in length");
        nb::gil_scoped_release unlocked;
        parallel_ranges(from.size(), 512, [&](std::size_t begin, std::size_t end) {
            for (std::size_t i = begin; i < end; ++i) copy_line(THREAD, to.data()[i], from.data()[i], layout.shape);
        });
    });
    m.def("initialise_missing", &initialise_missing, nb::call_guard<nb::gil_scoped_release>());
    m.def("gather", [](const Batch& batch, const Layout& layout, std::size_t begin, Out<float, nb::ndim<2>> out) {
        require(begin + out.shape(0) <= batch.size && out.shape(1) == layout.shape.dim,
                "out must be [n, dim] within the batch");
        nb::gil_scoped_release unlocked;
        gather(batch, layout, begin, out.shape(0), out.data());
    });
    m.def("update", [](Batch& batch, const Layout& layout, In<float, nb::ndim<2>> grads, std::string rule,
                       std::vector<float> hyper, u32 step) {
        require(grads.shape(0) == batch.size && grads.shape(1) == layout.shape.dim, "grads must be [batch.size, dim]");
        nb::gil_scoped_release unlocked;
        return update(batch, layout, grads.data(), rule, hyper, step);
    });
    m.def("assign", [](Batch& batch, const Layout& layout, In<float, nb::ndim<2>> values, u32 step) {
        require(values.shape(0) == batch.size && values.shape(1) == layout.shape.dim,
                "values must be [batch.size, dim]");
        nb::gil_scoped_release unlocked;
        return assign(batch, layout, values.data(), step);
    });
    m.def("count_new", [](const Batch& batch, const Layout& layout) {
        nb::gil_scoped_release unlocked;
        return count_new(batch, layout);
    });
}

void bind_full_table(nb::module_& m) {
    nb::class_<FullTable>(m, "FullTable")
        .def(nb::init<const Layout&>())
        .def("find", &FullTable::find, nb::call_guard<nb::gil_scoped_release>())
        .def("insert_missing", &FullTable::insert_missing, nb::call_guard<nb::gil_scoped_release>())
        .def("read", &read_rows<FullTable>)
        .def("write", &write_rows<FullTable>)
        .def("held", &FullTable::held, nb::call_guard<nb::gil_scoped_release>())
        .def("scan",
             [](const FullTable& table, u32 bucket, OutVector<u8> rows) {
                 nb::gil_scoped_release unlocked;
                 require(rows.size() == table.held(bucket) * packed_bytes_of(table.width()),
                         "rows must have room for the bucket's rows exactly");
                 table.scan(bucket, rows.data());
             })
        .def_prop_ro("rows", &FullTable::rows)
        .def_prop_ro("bytes", &FullTable::bytes);
}

void bind_cache(nb::module_& m) {
    nb::class_<Admission>(m, "Admission")
        .def_prop_ro("lines", [](nb::handle_t<Admission> self) { return view(nb::cast<Admission&>(self).lines, self); })
        .def_prop_ro(
            "hit",
            [](const Admission& a) {
                return flags(a.hit.size(), [&](bool* out) { std::copy(a.hit.begin(), a.hit.end(), out); });
            },
            nb::rv_policy::move)
        .def_prop_ro("victim_tables",
                     [](nb::handle_t<Admission> self) { return view(nb::cast<Admission&>(self).victim_tables, self); })
        .def_prop_ro("victim_keys",
                     [](nb::handle_t<Admission> self) { return view(nb::cast<Admission&>(self).victim_keys, self); })
        .def_prop_ro("victim_lines",
                     [](nb::handle_t<Admission> self) { return view(nb::cast<Admission&>(self).victim_lines, self); });
    nb::class_<Cache>(m, "Cache")
        .def(nb::init<const Layout&, std::size_t>())
        .def("admit",
             [](Cache& cache, InVector<u32> tables, InVector<u64> keys) {
                 require(tables.size() == keys.size(), "tables and keys differ in length");
                 nb::gil_scoped_release unlocked;
                 return cache.admit(tables.data(), keys.data(), keys.size());
             })
        .def("release", &Cache::release, nb::arg("admission"), nb::arg("dirty"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("cancel", &Cache::cancel, nb::arg("admission"), nb::arg("restore"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("find",
             [](const Cache& cache, InVector<u32> tables, InVector<u64> keys, OutVector<u64> lines) {
                 require(tables.size() == keys.size() && keys.size() == lines.size(),
                         "tables, keys and lines differ in length");
                 nb::gil_scoped_release unlocked;
                 cache.find(tables.data(), keys.data(), lines.data(), keys.size());
             })
        .def("dirty",
             [](const Cache& cache) {
                 std::vector<u32> tables;
                 std::vector<u64> keys, lines;
                 cache.dirty(tables, keys, lines);
                 return nb::make_tuple(own(std::move(tables)), own(std::move(keys)), own(std::move(lines)));
             })
        .def("mark_clean", &Cache::mark_clean)
        .def_prop_ro("capacity", &Cache::capacity)
        .def_prop_ro("used", &Cache::used)
        .def_prop_ro("bytes", &Cache::bytes)
        .def_prop_ro("counts", [](const Cache& cache) {
            nb::dict counts;
            counts["hits"] = cache.counts.hits;
            counts["misses"] = cache.counts.misses;
            counts["evictions_clean"] = cache.counts.evictions_clean;
            counts["evictions_dirty"] = cache.counts.evictions_dirty;
            counts["overflows"] = cache.counts.overflows;
            return counts;
        });
}

#ifdef TIERBED_ROCKSDB
void bind_rocksdb(nb::module_& m) {
    nb::class_<RocksTier> tier(m, "RocksTier");
    tier.def(
            "__init__",
            [](RocksTier* self, std::string folder, u32 width, bool create, u32 shards, std::size_t block_bytes,
               std::size_t block_cache_bytes, std::size_t write_buffer_bytes) {
                nb::gil_scoped_release unlocked;
                new (self)
                    RocksTier(folder, width, {create, shards, block_bytes, block_cache_bytes, write_buffer_bytes});
            },
            nb::arg("folder"), nb::arg("width"), nb::kw_only(), nb::arg("create"), nb::arg("shards"),
            nb::arg("block_bytes"), nb::arg("block_cache_bytes"), nb::arg("write_buffer_bytes"))
        .def("read", &read_rows<RocksTier>)
        .def("write", &write_rows<RocksTier>)
        .def("flush", &RocksTier::flush, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &RocksTier::close, nb::call_guard<nb::gil_scoped_release>())
        .def("property", &RocksTier::property)
        .def(
            "scan", [](const RocksTier& t) { return new RocksTier::Scan(t); }, nb::keep_alive<0, 1>(),
            nb::rv_policy::take_ownership);
    nb::class_<RocksTier::Scan>(tier, "Scan")
        .def("close", &RocksTier::Scan::close)
        .def("next", [](RocksTier::Scan& scan, OutVector<u8> rows, std::size_t max_rows) {
            u32 bucket = 0;
            std::size_t n;
            require(rows.size() >= max_rows * packed_bytes_of(scan.width()), "rows must have room for max_rows");
            {
                nb::gil_scoped_release unlocked;
                n = scan.next(rows.data(), max_rows, bucket);
            }
            return nb::make_tuple(bucket, n);
        });
}
#endif

}  // namespace

NB_MODULE(_core, m) {
    m.def("set_threads", &set_threads);
    m.def("normal_quantile", [](double p) {
        require(p > 0.0 && p < 1.0, "p must lie between 0 and 1");
        return normal_quantile(p);
    });
    m.def("buckets", [](InVector<u32> tables, InVector<u64> keys) {
        require(tables.size() == keys.size(), "tables and keys differ in length");
        std::vector<u8> buckets(keys.size());
        for (std::size_t i = 0; i < buckets.size(); ++i)
            buckets[i] = static_cast<u8>(bucket_of(hash_row(tables.data()[i], keys.data()[i])));
        return own(std::move(buckets));
    });
    bind_layout(m);
    bind_batch(m);
    bind_step(m);
    bind_full_table(m);
    bind_cache(m);
#ifdef TIERBED_ROCKSDB
    m.attr("has_rocksdb") = true;
    bind_rocksdb(m);
#else
    m.attr("has_rocksdb") = false;
#endif
}
