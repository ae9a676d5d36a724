// Python binding of the cache.
#include <nanobind/stl/shared_ptr.h>

#include "ops/native/bind.h"
#include "cache_tier.h"
#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

CachePolicy parse_policy(const std::string& name) {
    require(name == "lru" || name == "lfu", "policy: lru or lfu");
    return name == "lfu" ? LFU : LRU;
}

std::optional<nb::dict> locate(CacheTier& tier, u32 table, u64 key) {
    const auto row = without_gil([&] { return tier.locate(table, key); });
    if (!row) return std::nullopt;
    nb::dict all = to_dict(row->counters);
    all["slot"] = row->slot;
    all["overflow"] = row->slot < 0;
    all["pinned"] = row->is_pinned;
    all["dirty"] = row->is_dirty;
    return all;
}

}  // namespace

void bind_cache(nb::module_& m) {
    nb::class_<CacheTier, Tier>(m, "CacheTier")
        .def(
            "__init__",
            [](CacheTier* self, const Layout& layout, Tier& lower, std::size_t budget_bytes,
               std::size_t overflow_bytes, const std::string& policy, std::size_t io_threads, bool grows_with_batch) {
                nb::gil_scoped_release released;
                new (self) CacheTier(
                    layout, lower, {budget_bytes, overflow_bytes, parse_policy(policy), io_threads, grows_with_batch});
            },
            "layout"_a, "lower_tier"_a, nb::kw_only(), "budget_bytes"_a, "overflow_bytes"_a, "policy"_a, "io_threads"_a,
            "grows_with_batch"_a = false, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("announce", &CacheTier::announce, Unlocked())
        .def("prefetch", &CacheTier::prefetch, Unlocked())
        .def("pin", &CacheTier::pin, Unlocked())
        .def("unpin", &CacheTier::unpin, Unlocked())
        .def("cancel_announced", &CacheTier::cancel_announced, Unlocked())
        .def("peek", &CacheTier::peek, Unlocked())
        .def("flush", &CacheTier::flush, "will_flush"_a = true, Unlocked())
        .def("flush_piece", &CacheTier::flush_piece, "begin"_a, Unlocked())
        .def("list_dirty", [](CacheTier& tier) { return to_arrays([&] { return tier.list_dirty(); }); })
        .def("close", &CacheTier::close, Unlocked())
        .def("locate", &locate, "table"_a, "key"_a)
        .def("metrics", &read_metrics<CacheTier>)
        .def("hit_counts", &read_hit_counts<CacheTier>);
    m.attr("WAYS") = WAYS;
    m.attr("GROUP_WAYS") = GROUP_WAYS;
    m.attr("WAY_BYTES") = sizeof(Way);
    m.def("use_own_pool", &use_own_pool, "num_threads"_a);
}

}  // namespace tierbed
