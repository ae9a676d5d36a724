// Python binding of the cache.
#include <nanobind/stl/shared_ptr.h>

#include "ops/native/bind.h"
#include "cached_tier.h"
#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

CachePolicy parse_policy(const std::string& name) {
    require(name == "lru" || name == "lfu", "policy: lru or lfu");
    return name == "lfu" ? LFU : LRU;
}

std::optional<nb::dict> locate(CachedTier& tier, u32 table, u64 key) {
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
    nb::class_<CachedTier, Tier>(m, "CachedTier")
        .def(
            "__init__",
            [](CachedTier* self, const Layout& layout, Tier& lower, std::size_t budget_bytes,
               std::size_t overflow_bytes, const std::string& policy, std::size_t io_threads, bool grows_with_batch) {
                nb::gil_scoped_release released;
                new (self) CachedTier(
                    layout, lower, {budget_bytes, overflow_bytes, parse_policy(policy), io_threads, grows_with_batch});
            },
            "layout"_a, "lower_tier"_a, nb::kw_only(), "budget_bytes"_a, "overflow_bytes"_a, "policy"_a, "io_threads"_a,
            "grows_with_batch"_a = false, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("announce", &CachedTier::announce, Unlocked())
        .def("prefetch", &CachedTier::prefetch, Unlocked())
        .def("pin", &CachedTier::pin, Unlocked())
        .def("unpin", &CachedTier::unpin, Unlocked())
        .def("cancel", &CachedTier::cancel, Unlocked())
        .def("peek", &CachedTier::peek, Unlocked())
        .def("flush", &CachedTier::flush, Unlocked())
        .def("flush_piece", &CachedTier::flush_piece, "begin"_a, "rows"_a, Unlocked())
        .def("close", &CachedTier::close, Unlocked())
        .def("locate", &locate, "table"_a, "key"_a)
        .def("metrics", &read_metrics<CachedTier>)
        .def("hit_counts", &read_hit_counts<CachedTier>);
    m.attr("WAYS") = WAYS;
    m.attr("GROUP_WAYS") = GROUP_WAYS;
    m.attr("WAY_BYTES") = sizeof(Way);
    m.def("use_own_pool", &use_own_pool, "threads"_a);
}

}  // namespace tierbed
