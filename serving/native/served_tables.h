// All tables of an embedding in one version.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lookup_loops.h"
#include "ops/native/histogram.h"
#include "ops/native/layout.h"
#include "row_file.h"

namespace tierbed::serving {

// What lookups need to know of an embedding, from the bytes that `pack_settings` in serving/settings.py makes.
struct Settings {
    explicit Settings(const std::string& bytes);  // throws std::runtime_error if the bytes are invalid

    u32 dim, num_tables;
    std::optional<u64> padding_key;
    std::vector<u64> max_ids;  // empty if all ids are legal
    std::vector<u32> drops_illegal;
    std::unique_ptr<const Layout> layout;  // makes initial rows
};

using TablePaths = std::pair<std::string, std::string>;  // a table's base, and its delta or ""

// Counts and times of all lookups. Later versions of the same embedding go on with them.
struct LookupTotals {
    std::array<std::atomic<u64>, 5> counts{};  // COUNT_NAMES in served_tables.cpp
    Histogram times;
};

// Immutable, so any number of threads may look up rows without a lock.
class ServedTables {
public:
    // Takes files that `previous` has from there. unknown_initial: unknown ids get their initial rows, not zeros.
    // Throws std::runtime_error if a file cannot be opened or does not fit the settings.
    ServedTables(const std::string& settings, const std::vector<TablePaths>& paths, bool unknown_initial,
                 const ServedTables* previous);

    u32 dim() const { return settings_.dim; }
    Metrics metrics() const;

    // Writes rows to out [bags, dim]. Returns the counts, with the first illegal id. Throws std::invalid_argument if a
    // table id is out of range. The other arguments must be valid.
    LookupCounts look_up(const Lookup& lookup, FloatType output_type, void* out) const;

private:
    std::shared_ptr<RowFile> open(const std::string& path, u32 table, bool is_delta,
                                  const ServedTables* previous) const;

    const Settings settings_;
    const bool unknown_initial_;
    bool has_deltas_ = false;
    std::vector<std::shared_ptr<RowFile>> files_;  // [2 * tables]: base and delta; null if there is no delta
    std::vector<TableView> views_;
    std::shared_ptr<LookupTotals> totals_;
};

}  // namespace tierbed::serving
