// Compiled once for each instruction set with TIERBED_LOOPS naming its table. It includes kernels alone: an inline
// function of the standard library that was compiled here could end up in code that runs on older processors.
#include "loops.h"

#include "../kernels/pool.h"
#include "../kernels/update.h"
#include "rules.h"  // made of engine/optim

namespace tierbed {
namespace {

constexpr Tile ONE_THREAD{0, 1};
constexpr std::size_t ROW_BYTES_AHEAD = 8192;  // bytes of rows that are fetched before they are read

std::size_t bag_begin(const GatherJob& job, std::size_t bag) {
    return job.offsets ? static_cast<std::size_t>(job.offsets[bag]) : bag * job.length;
}

u64 line_at(const GatherJob& job, std::size_t position) {
    const i32 row = job.inverse[position];
    return row < 0 ? 0 : job.lines[row];
}

// Positions to look ahead.
std::size_t distance(u32 row_bytes) {
    const std::size_t rows = ROW_BYTES_AHEAD / row_bytes;
    return rows < 4 ? 4 : rows > 32 ? 32 : rows;
}

template <class Type>
void gather(const GatherJob& job, std::size_t begin, std::size_t end) {
    auto* out = static_cast<typename Type::Stored*>(job.out);
    const std::size_t ahead = distance(job.dim * 4);
    std::size_t fetched = bag_begin(job, begin);
    const std::size_t last = bag_begin(job, end);
    const auto fetch_up_to = [&](std::size_t position) {
        for (; fetched < last && fetched < position; ++fetched)
            if (const u64 line = line_at(job, fetched)) prefetch_bytes(line, job.dim * 4);
    };
    for (std::size_t bag = begin; bag < end; ++bag) {
        const std::size_t first = bag_begin(job, bag), next = bag_begin(job, bag + 1);
        fetch_up_to(next + ahead);
        if (job.pooled) {
            const Bag rows{job.inverse + first, job.weights ? job.weights + first : nullptr,
                           static_cast<u32>(next - first), job.mean};
            pool_row<Type>(ONE_THREAD, out + bag * job.dim, job.lines, rows, job.dim);
        } else {
            gather_row<Type>(ONE_THREAD, out + bag * job.dim, line_at(job, bag), job.dim);
        }
    }
}

template <class Type>
void weights_grad(const WeightsGradJob& job, std::size_t begin, std::size_t end) {
    const auto* grads = static_cast<const typename Type::Stored*>(job.grads);
    for (std::size_t bag = begin; bag < end; ++bag) {
        const std::size_t first = bag_begin(job.lookup, bag), next = bag_begin(job.lookup, bag + 1);
        const Bag rows{job.lookup.inverse + first, nullptr, static_cast<u32>(next - first), job.lookup.mean};
        pool_weights_grad<Type>(ONE_THREAD, job.out + first, job.lookup.lines, rows, grads + bag * job.lookup.dim,
                                job.lookup.dim);
    }
}

template <class Type, class Rule>
std::size_t update(const UpdateJob& job, std::size_t begin, std::size_t end, float* whole) {
    const Rule rule(job.hyper);
    const std::size_t ahead = distance(job.shape.line_bytes);
    std::size_t written = 0;
    for (std::size_t row = begin; row < end; ++row) {
        if (row + ahead < end) prefetch_bytes(job.lines[row + ahead], job.shape.line_bytes);
        const u32 first = job.offsets[row], count = job.offsets[row + 1] - first;
        const Occurrences occurrences{job.sources + first, job.scales ? job.scales + first : nullptr, count,
                                      job.sources + job.offsets[end]};
        written +=
            update_row<Type>(ONE_THREAD, job.lines[row], job.shape, job.gradients, occurrences, rule, job.step, whole);
    }
    return written;
}

template <class Rule>
void catch_up_lines(const CatchUpJob& job, std::size_t begin, std::size_t end) {
    const Rule rule(job.hyper);
    for (std::size_t i = begin; i < end; ++i) {
        Record* lifecycle = record(job.lines[i], job.shape);
        if (!is_behind(*lifecycle, job.step)) continue;
        catch_up(ONE_THREAD, floats(job.lines[i]), job.shape.dim, rule, lifecycle->step, job.step);
        lifecycle->step = job.step - 1;
    }
}

template <class Rule>
constexpr RuleLoops loops_of() {
    RuleLoops loops{Rule::NAME,
                    Rule::ELEMENT_STATES,
                    Rule::ROW_STATES,
                    Rule::HYPERS + Rule::CLIPS,
                    {update<Float32, Rule>, update<Float16, Rule>, update<BFloat16, Rule>},
                    nullptr};
    if constexpr (Rule::CATCHES_UP) loops.catch_up = catch_up_lines<Rule>;
    return loops;
}

template <class... Rule>
struct Table {
    static constexpr RuleLoops loops[] = {loops_of<Rule>()...};
};
template <class... Rule>
constexpr const RuleLoops* table_of(Rules<Rule...>) {
    return Table<Rule...>::loops;
}

}  // namespace

extern const Loops TIERBED_LOOPS;
const Loops TIERBED_LOOPS{TIERBED_ISA,
                          {gather<Float32>, gather<Float16>, gather<BFloat16>},
                          {weights_grad<Float32>, weights_grad<Float16>, weights_grad<BFloat16>},
                          table_of(AllRules{}),
                          AllRules::COUNT};

}  // namespace tierbed
