// Runs training steps of the native core without Python. `instructions.py` counts their instructions with callgrind.
//
//     instructions        prints a line for each workload: its name and how many ids were counted.
//
// Each part of a step is dumped by callgrind under the names of the workload and the part. One thread, fixed ids and
// no dependence on addresses or clocks make the counts equal in every run.
#include <cstdio>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <valgrind/callgrind.h>

#include "cache/native/cache_tier.h"
#include "ops/native/thread_pool.h"
#include "ops/native/step.h"
#include "store/native/full_table.h"

namespace tierbed {
namespace {

constexpr u32 TABLES = 26, WARM_STEPS = 4, COUNTED_STEPS = 2;

struct Workload {
    const char* name;
    const char* rule;
    std::vector<double> hyperparams;
    std::vector<u32> state_widths;
    u32 dim, rows, batch;  // rows per table
    u32 length = 1;        // ids per bag
    bool skewed = false;   // if ids repeat within a batch
    bool fresh = false;    // if all rows are new in every step
    u32 cached = 0;        // size of a cache in front of the table, in percent of the rows; 0 for no cache
    u32 ahead = 0;         // how many steps ahead are announced to the cache
};

const std::vector<double> ADAGRAD{0.01, 0, 0, 1e-10, 0, 0, 0};  // lr, weight decay, maximize, eps, limits
const std::vector<double> ROWWISE{0.01, 0, 1, 1e-8, 0, 0, 0};   // lr, weight decay, decay, eps, limits

const std::vector<Workload> WORKLOADS{
    // name, rule, hyperparams, state widths, dim, rows, batch, and fields that differ from the defaults
    {"d16-uniform", "adagrad", ADAGRAD, {16}, 16, 8000, 1024},
    {"d16-skewed", "adagrad", ADAGRAD, {16}, 16, 8000, 1024, 1, true},
    {"d16-new", "adagrad", ADAGRAD, {16}, 16, 8000, 1024, 1, false, true},
    {"d128-rowwise", "rowwise_adagrad", ROWWISE, {1}, 128, 4000, 512},
    {"d128-bags", "rowwise_adagrad", ROWWISE, {1}, 128, 4000, 32, 20},
    {"d16-cached", "adagrad", ADAGRAD, {16}, 16, 8000, 1024, 1, true, false, 20},
    {"d16-ahead", "adagrad", ADAGRAD, {16}, 16, 8000, 1024, 1, true, false, 20, 4},
};

u64 mixed(u64 x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

class Steps {
public:
    explicit Steps(const Workload& work)
        : work_(work),
          layout_(work.dim, std::vector<float>(work.state_widths.size()), work.state_widths, 1, {work.dim},
                  std::vector<InitialValues>(TABLES, {Initial::uniform, -0.1f, 0.1f, 0, 0})),
          rule_(layout_, work.rule, work.hyperparams),
          table_(layout_),
          out_(bags() * work.dim),
          grads_(bags() * work.dim, 0.5f),
          written_(TABLES) {
        if (!work.fresh) fill();
        if (!work.cached) return;
        const std::size_t rows = std::size_t{TABLES} * work.rows * work.cached / 100;
        const std::size_t bytes = rows * (layout_.shape.line_bytes + sizeof(Way) + 1);
        cache_ = std::make_unique<CacheTier>(layout_, table_, CacheOptions{bytes, 64 << 20, LRU, 1});
    }

    void run() {
        for (u32 step = 0; step < WARM_STEPS; ++step) next();
        counting_ = true;
        CALLGRIND_START_INSTRUMENTATION;
        for (u32 step = 0; step < COUNTED_STEPS; ++step) next();
        CALLGRIND_STOP_INSTRUMENTATION;
        const u64 changed = cache_ ? evicted_rows() : written_rows();
        if (changed == 0) throw std::logic_error(std::string(work_.name) + " updated or evicted no row");
        std::printf("%s %zu\n", work_.name, bags() * work_.length * COUNTED_STEPS);
    }

private:
    std::size_t bags() const { return std::size_t{TABLES} * work_.batch; }

    // Calls body and dumps its instruction count.
    template <class Body>
    void part(const char* name, const Body& body) {
        if (!counting_) return body();
        static std::deque<std::string> names;  // callgrind reads the names when the program ends
        names.push_back(std::string(work_.name) + " " + name);
        CALLGRIND_ZERO_STATS;
        body();
        CALLGRIND_DUMP_STATS_AT(names.back().c_str());
    }

    // Writes every row of the table once.
    void fill() {
        std::vector<u64> keys(std::size_t{TABLES} * work_.rows);
        for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = mixed(i / TABLES);
        const auto batch = batch_of(keys, 1);
        table_.look_up_rows(*batch);
        table_.insert_missing(*batch, layout_);
        const std::vector<float> values(keys.size() * work_.dim);
        assign(*batch, layout_, values.data(), 1, written_.data());
    }

    std::shared_ptr<Batch> batch_of(const std::vector<u64>& keys, std::size_t length) const {
        const Bags bags{nullptr, length, nullptr, 0, 0};
        const LookupArrays arrays{keys.data(), nullptr, keys.size(), keys.size() / length, bags, 0, length > 1};
        return std::make_shared<Batch>(
            std::make_shared<const UniqueRows>(std::vector<LookupArrays>{arrays}, TABLES, std::nullopt, LegalIds{}));
    }

    std::vector<u64> draw() {
        std::vector<u64> keys(bags() * work_.length);
        for (u64& key : keys) {
            const u64 random = mixed(~drawn_++);
            u64 row = (random >> 32) * work_.rows >> 32;
            if (work_.skewed) row = row * row / work_.rows * (random & 0xFFFF) >> 16;
            key = mixed(work_.fresh ? drawn_ / TABLES + work_.rows : row);
        }
        return keys;
    }

    void next() {
        const auto batch = next_batch();
        part("lookup", [&] {
            if (cache_)
                cache_->pin(batch);
            else if (table_.look_up_rows(*batch))
                table_.insert_missing(*batch, layout_);
        });
        const Pooling pooling{false, nullptr, FloatType::float32};
        part("gather", [&] { gather(*batch, layout_, 0, pooling, out_.data()); });
        part("update", [&] {
            update(*batch, layout_, {{grads_.data(), pooling}}, rule_, ++step_, 1.0f, written_.data());
            if (cache_) cache_->unpin(*batch);
        });
    }

    // Returns the next step's batch. Batches drawn ahead are announced and prefetched.
    std::shared_ptr<Batch> next_batch() {
        do {
            const std::vector<u64> keys = draw();
            part("deduplication", [&] { drawn_batches_.push_back(batch_of(keys, work_.length)); });
            if (!work_.ahead) continue;
            part("lookup", [&] {
                cache_->announce(drawn_batches_.back());
                cache_->prefetch(*drawn_batches_.back());
            });
        } while (drawn_batches_.size() <= work_.ahead);
        const auto batch = drawn_batches_.front();
        drawn_batches_.pop_front();
        return batch;
    }

    u64 evicted_rows() const {
        for (const auto& [name, count] : cache_->metrics().counts)
            if (name == "evictions_dirty") return count;
        return 0;
    }

    u64 written_rows() const {
        u64 sum = 0;
        for (const u64 rows : written_) sum += rows;
        return sum;
    }

    const Workload& work_;
    const Layout layout_;
    const BoundRule rule_;
    FullTable table_;
    std::unique_ptr<CacheTier> cache_;
    std::deque<std::shared_ptr<Batch>> drawn_batches_;
    std::vector<float> out_, grads_;
    std::vector<u64> written_;
    bool counting_ = false;
    u64 drawn_ = 0;
    u32 step_ = 1;
};

}  // namespace
}  // namespace tierbed

int main() {
    tierbed::set_num_threads(1);
    for (const tierbed::Workload& work : tierbed::WORKLOADS) tierbed::Steps(work).run();
}
