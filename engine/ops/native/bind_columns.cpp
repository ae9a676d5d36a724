// Python binding of `move_columns`.
#include <algorithm>
#include <numeric>

#include "bind.h"
#include "instruction_sets.h"
#include "thread_pool.h"

namespace tierbed {
namespace {

constexpr u64 TASK_BYTES = 1 << 18;  // size of the rows that one task copies

// Parses (address, bytes from row to row, columns) for each matrix.
std::vector<Matrix> parse_matrices(const std::vector<u64>& numbers) {
    require(numbers.size() % 3 == 0, "matrices must be [n, 3]: address, row stride in bytes, columns");
    std::vector<Matrix> all;
    for (std::size_t i = 0; i < numbers.size(); i += 3) all.push_back({numbers[i], numbers[i + 1], numbers[i + 2]});
    return all;
}

// True if all moves lie within the matrices. With `must_fill_targets`, each target column must be written exactly once.
bool are_moves_valid(const std::vector<Move>& moves, const std::vector<Matrix>& sources,
                     const std::vector<Matrix>& targets, bool must_fill_targets) {
    const auto is_within = [](const std::vector<Matrix>& all, u32 matrix, u32 first, u32 count) {
        return matrix < all.size() && u64{first} + count <= all[matrix].columns;
    };
    for (const Move& move : moves)
        if (!is_within(sources, move.source, move.source_column, move.num_columns) ||
            !is_within(targets, move.target, move.target_column, move.num_columns))
            return false;
    if (!must_fill_targets) return true;
    std::vector<Move> order = moves;
    std::sort(order.begin(), order.end(), [](const Move& a, const Move& b) {
        return std::tie(a.target, a.target_column, a.num_columns) < std::tie(b.target, b.target_column, b.num_columns);
    });
    std::vector<u64> num_filled(targets.size());
    for (const Move& move : order) {
        if (num_filled[move.target] != move.target_column) return false;
        num_filled[move.target] += move.num_columns;
    }
    for (std::size_t t = 0; t < targets.size(); ++t)
        if (num_filled[t] != targets[t].columns) return false;
    return true;
}

}  // namespace

void bind_columns(nb::module_& m) {
    m.def("move_columns", [](const std::vector<u64>& from, const std::vector<u64>& to, InVector<i64> permutes, u64 rows,
                             const std::string& dtype, bool is_gradient) {
        require(permutes.size() % 6 == 0, "permutes must be [moves, 6]");
        const std::vector<Matrix> sources = parse_matrices(from), targets = parse_matrices(to);
        std::vector<Move> moves;
        for (const i64* move = permutes.data(); move != permutes.data() + permutes.size(); move += 6) {
            if (std::any_of(move, move + 5, [](i64 number) { return number < 0 || number >> 32; })) return false;
            u32 numbers[5];
            std::copy_n(move, 5, numbers);
            if (is_gradient) std::swap(numbers[0], numbers[1]), std::swap(numbers[2], numbers[3]);
            moves.push_back({numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]});
        }
        if (!are_moves_valid(moves, sources, targets, !is_gradient)) return false;
        const ColumnsJob job{sources.data(), targets.data(), targets.size(), moves.data(), moves.size(), is_gradient};
        const bool is_float64 = dtype == "float64";
        const auto run = loops().move_columns[is_float64 ? FLOAT_TYPES : static_cast<u32>(parse_float_type(dtype))];
        u64 columns = 1;
        for (const Matrix& matrix : targets) columns += matrix.columns;
        nb::gil_scoped_release unlocked;
        parallel_ranges(rows, std::max<u64>(1, TASK_BYTES / (columns * (is_float64 ? 8 : 4))),
                        [&](std::size_t begin, std::size_t end) { run(job, begin, end); });
        return true;
    });
}

}  // namespace tierbed
