// Python binding of the cache.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include "ops/native/bind.h"
#include "cached_tier.h"
#include "ops/native/thread_pool.h"

namespace tierbed {
namespace {

Replacement policy_of(const std::string& name) {
    require(name == "lru" || name == "lfu", "policy: lru or lfu");
    return name == "lfu" ? LFU : LRU;
}

nb::object locate(CachedTier& tier, u32 table, u64 key) {
    const auto row = without_gil([&] { return tier.find(table, key); });
    if (!row) return nb::none();
    nb::dict all = described(row->record);
    all["slot"] = row->slot;
    all["overflow"] = row->slot < 0;
    all["pinned"] = row->pinned;
    all["dirty"] = row->dirty;
    return all;
}

}  // namespace

void bind_cache(nb::module_& m) {
    const nb::call_guard<nb::gil_scoped_release> unlocked;
    nb::class_<CachedTier, Tier>(m, "CachedTier")
        .def(
            "__init__",
            [](CachedTier* self, const Layout& layout, Tier& below, std::size_t budget_bytes,
               std::size_t overflow_bytes, const std::string& policy, std::size_t io_threads, bool follows_batch) {
                const CacheOptions options{budget_bytes, overflow_bytes, policy_of(policy), io_threads, follows_batch};
                nb::gil_scoped_release released;
                new (self) CachedTier(layout, below, options);
            },
            nb::arg("layout"), nb::arg("below"), nb::kw_only(), nb::arg("budget_bytes"), nb::arg("overflow_bytes"),
            nb::arg("policy"), nb::arg("io_threads"), nb::arg("follows_batch") = false, nb::keep_alive<1, 2>(),
            nb::keep_alive<1, 3>())
        .def("announce", &CachedTier::announce, unlocked)
        .def("prefetch", &CachedTier::prefetch, unlocked)
        .def("pin", &CachedTier::pin, unlocked)
        .def("unpin", &CachedTier::unpin, unlocked)
        .def("cancel", &CachedTier::cancel, unlocked)
        .def("peek", &CachedTier::peek, unlocked)
        .def("flush", &CachedTier::flush, unlocked)
        .def("flush_some", &CachedTier::flush_some, unlocked)
        .def("close", &CachedTier::close, unlocked)
        .def("locate", &locate)
        .def("metrics", &metrics_of<CachedTier>)
        .def("hit_counts", &hit_counts<CachedTier>);
    m.attr("WAYS") = WAYS;
    m.attr("GROUP") = GROUP;
    m.attr("WAY_BYTES") = sizeof(Way);
    m.def("use_own_pool", &use_own_pool, nb::arg("threads"));
}

}  // namespace tierbed
