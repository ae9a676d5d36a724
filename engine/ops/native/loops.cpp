// Compiled once per instruction set; TIERBED_LOOPS names the resulting table. Include only kernels here. If
// this file compiled an inline library function, the linker might keep this copy. Older processors could not run it.
#include "loops.h"

#include "ops/kernels/codec.h"
#include "ops/kernels/hash.h"
#include "ops/kernels/pool.h"
#include "ops/kernels/update.h"
#include "rules.h"  // generated from engine/optim

namespace tierbed {
namespace {

constexpr Tile ONE_THREAD{0, 1};
constexpr std::size_t PREFETCH_BYTES = 8192;  // how far ahead rows are prefetched

u64 find_line(const GatherJob& job, std::size_t position) {
    const i32 row = job.inverse[position];
    return row < 0 ? 0 : job.lines[row];
}

// Returns how many rows to prefetch ahead.
std::size_t choose_prefetch_distance(u32 row_bytes) {
    const std::size_t rows = PREFETCH_BYTES / row_bytes;
    return rows < 4 ? 4 : rows > 32 ? 32 : rows;
}

template <class Row, class Type>
__attribute__((noinline)) void gather_bags(const GatherJob& shared, std::size_t begin, std::size_t end) {
    const GatherJob job = shared;
    auto* out = static_cast<typename Type::Stored*>(job.out);
    const i32* const last = job.inverse + job.n;
    if (!job.is_pooled) {
        for (std::size_t i = begin; i < end; ++i) {
            prefetch_row<Row>(job.lines, job.inverse + i, last, job.dim);
            gather_row<Row, Type>(ONE_THREAD, out + i * job.dim, find_line(job, i), job.dim);
        }
        return;
    }
    for (std::size_t bag = begin; bag < end; ++bag) {
        const std::size_t first = job.bags.begin(bag), next = job.bags.end(bag);
        const Bag rows{job.inverse + first, job.weights ? job.weights + first : nullptr, static_cast<u32>(next - first),
                       job.is_mean, last};
        pool_row<Row, Type>(ONE_THREAD, out + job.bags.output_row(bag) * job.dim, job.lines, rows, job.dim);
    }
}

template <class Type>
void gather(const GatherJob& job, std::size_t begin, std::size_t end) {
    with_type(job.row_type, [&](auto row) { gather_bags<decltype(row), Type>(job, begin, end); });
}

template <class Row, class Type>
__attribute__((noinline)) void compute_bags_weights_grad(const WeightsGradJob& job, std::size_t begin,
                                                         std::size_t end) {
    const auto* grads = static_cast<const typename Type::Stored*>(job.grads);
    for (std::size_t bag = begin; bag < end; ++bag) {
        const std::size_t first = job.lookup.bags.begin(bag), next = job.lookup.bags.end(bag);
        const Bag rows{job.lookup.inverse + first, nullptr, static_cast<u32>(next - first), job.lookup.is_mean,
                       nullptr};
        compute_bag_weights_grad<Row, Type>(ONE_THREAD, job.out + first, job.lookup.lines, rows,
                                            grads + job.lookup.bags.output_row(bag) * job.lookup.dim, job.lookup.dim);
    }
}

template <class Type>
void compute_weights_grad(const WeightsGradJob& job, std::size_t begin, std::size_t end) {
    with_type(job.lookup.row_type, [&](auto row) { compute_bags_weights_grad<decltype(row), Type>(job, begin, end); });
}

void decode(const CodecJob& job, std::size_t begin, std::size_t end) {
    const u32 bytes = make_float32_shape(job.shape).line_bytes;
    for (std::size_t i = begin; i < end; ++i)
        decode_line(ONE_THREAD, job.float32_lines + (i - begin) * bytes, job.lines[i], job.shape);
}

Noise make_noise(const CodecJob& job, std::size_t row) {
    return Noise(job.seed, slot_hash.row_hash(job.tables[row], job.hashes[row]), job.step);
}

void encode(const CodecJob& job, std::size_t begin, std::size_t end) {
    const u32 bytes = make_float32_shape(job.shape).line_bytes;
    for (std::size_t i = begin; i < end; ++i) {
        const u64 line = job.float32_lines + (i - begin) * bytes;
        if (job.hashes)
            encode_line(ONE_THREAD, job.lines[i], line, job.shape, make_noise(job, i));
        else
            encode_line(ONE_THREAD, job.lines[i], line, job.shape, NoNoise{});
    }
}

using SumRow = void (*)(float*, float*, const OutputGradients&, const Occurrences&);

// Not inlined into `update`, so that rules are not compiled once per gradient type.
template <class Type>
__attribute__((noinline)) void sum_whole_row(float* sum, float* block, const OutputGradients& gradients,
                                             const Occurrences& row) {
    sum_row_gradient<Type>(sum, block, gradients, row, 0, gradients.dim);
}

constexpr SumRow SUM_ROW[FLOAT_TYPES] = {sum_whole_row<Float32>, sum_whole_row<Float16>, sum_whole_row<BFloat16>};

TIERBED_FN Occurrences find_occurrences(const UpdateJob& job, std::size_t row) {
    const u32 first = job.offsets[row], count = job.offsets[row + 1] - first;
    return {job.output_rows + first, job.scales ? job.scales + first : nullptr, count, job.output_rows_end};
}

template <class Rule>
std::size_t update(const UpdateJob& shared, std::size_t begin, std::size_t end, float* memory) {
    const UpdateJob job = shared;  // a local copy, because writes to lines could alias `shared`
    const OutputGradients gradients = shared.gradients;
    const Rule rule(job.hyperparams);
    const SumRow sum_row = SUM_ROW[static_cast<u32>(job.type)];
    const std::size_t distance = choose_prefetch_distance(job.shape.line_bytes);
    float *sum = memory, *block = sum + job.shape.dim, *scratch = block + job.shape.dim;
    const bool in_place = job.type == FloatType::float32 && !job.scales;  // a single gradient needs no copy
    std::size_t written = 0;
    for (std::size_t row = begin; row < end; ++row) {
        if (row + distance < end) prefetch_to_write(job.lines[row + distance], job.shape.line_bytes);
        const Occurrences occurrences = find_occurrences(job, row);
        const float* gradient = sum;
        if (occurrences.count == 1 && in_place) {  // the common case, without a copy
            gradient = gradients.row<Float32>(*occurrences.output_rows);
            prefetch_output_row<Float32>(gradients, occurrences, 0);
        } else {
            sum_row(sum, block, gradients, occurrences);
        }
        const auto read_gradient = [&](float* g, u32 from, u32 n) TIERBED_INLINE {
            const float* const columns = gradient + from;  // an index that may wrap around prevents vectorisation
            TIERBED_NO_OVERLAP
            for (u32 j = 0; j < n; ++j) g[j] = columns[j] * job.scale;
        };
        job.last_steps[row] = row_counters(job.lines[row], job.shape)->step;
        written += apply_rule(ONE_THREAD, job.lines[row], job.shape, read_gradient, rule, job.step, scratch);
    }
    if (rule.row_norm > 0.0f)  // a separate loop, since a branch in the loop above would cost registers
        for (std::size_t row = begin; row < end; ++row)
            limit_row_norm(ONE_THREAD, job.lines[row], job.shape.dim, rule.row_norm);
    return written;
}

template <class Type>
void compute_squared_norms(const UpdateJob& job, std::size_t begin, std::size_t end, float* memory, float* out) {
    float block[VEC];
    for (std::size_t row = begin; row < end; ++row) {
        const Occurrences occurrences = find_occurrences(job, row);
        const auto sum_block = [&](float* g, u32 from, u32 n) TIERBED_INLINE {
            sum_row_gradient<Type>(g, block, job.gradients, occurrences, from, n);
        };
        out[row] = occurrences.count == 0 ? 0.0f : sum_squares(ONE_THREAD, job.gradients.dim, sum_block, memory);
    }
}

template <class Type>
void sum_gradients(const UpdateJob& job, std::size_t begin, std::size_t end, float* memory, const i64* indices,
                   float* out) {
    for (std::size_t row = begin; row < end; ++row) {
        const Occurrences occurrences = find_occurrences(job, row);
        const std::size_t index = indices ? static_cast<std::size_t>(indices[row]) : row;
        sum_whole_row<Type>(out + index * job.gradients.dim, memory, job.gradients, occurrences);
    }
}

template <class Type>
void move_columns(const ColumnsJob& shared, std::size_t begin, std::size_t end) {
    const ColumnsJob job = shared;
    for (std::size_t row = begin; row < end; ++row)
        if (job.should_add)
            add_row<Type>(job.sources, job.targets, job.num_targets, job.moves, job.num_moves, row);
        else
            copy_row<typename Type::Stored>(job.sources, job.targets, job.moves, job.num_moves, row);
}

template <class Rule>
void catch_up_lines(const CatchUpJob& job, std::size_t begin, std::size_t end) {
    const Rule rule(job.hyperparams);
    for (std::size_t i = begin; i < end; ++i) {
        RowCounters* counters = row_counters(job.lines[i], job.shape);
        if (!is_behind(*counters, job.step, Rule::MISSES_UNWRITTEN)) continue;
        catch_up(ONE_THREAD, floats(job.lines[i]), job.shape.dim, rule, *counters, job.step);
        counters->step = job.step - 1;
    }
}

template <class Rule>
constexpr RuleLoops make_rule_loops() {
    RuleLoops loops{Rule::NAME,
                    Rule::ELEMENT_STATES,
                    Rule::ROW_STATES,
                    Rule::HYPERPARAMS + Rule::LIMITS,
                    Rule::MISSES_UNWRITTEN,
                    update<Rule>,
                    nullptr};
    if constexpr (Rule::CATCHES_UP) loops.catch_up = catch_up_lines<Rule>;
    return loops;
}

template <class... Rule>
constexpr RuleLoops RULE_LOOPS[] = {make_rule_loops<Rule>()...};
template <class... Rule>
constexpr const RuleLoops* list_rule_loops(Rules<Rule...>) {
    return RULE_LOOPS<Rule...>;
}

}  // namespace

extern const Loops TIERBED_LOOPS = {
    TIERBED_ISA,
    {gather<Float32>, gather<Float16>, gather<BFloat16>},
    {compute_weights_grad<Float32>, compute_weights_grad<Float16>, compute_weights_grad<BFloat16>},
    decode,
    encode,
    {compute_squared_norms<Float32>, compute_squared_norms<Float16>, compute_squared_norms<BFloat16>},
    {sum_gradients<Float32>, sum_gradients<Float16>, sum_gradients<BFloat16>},
    {move_columns<Float32>, move_columns<Float16>, move_columns<BFloat16>, move_columns<Float64>},
    list_rule_loops(AllRules{}),
    AllRules::COUNT,
};

}  // namespace tierbed
