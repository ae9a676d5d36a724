// Copies column ranges between matrices (`copy_row`), or adds them for the gradient (`add_row`). `add_row`
// sets the targets to zeros, then adds each move's columns in order. Each sum is rounded to the type.
#pragma once
#include "float_types.h"
#include "portable.h"

namespace tierbed {

struct Float64 {
    using Stored = double;
    TIERBED_FN static double load(Stored x) { return x; }
    TIERBED_FN static Stored store(double x) { return x; }
};

struct Matrix {
    u64 address, stride;  // first row's address; bytes from row to row
    u64 columns;

    template <class Stored>
    TIERBED_FN Stored* row(u64 number) const {
        return reinterpret_cast<Stored*>(address + number * stride);
    }
};

struct Move {
    u32 source, target;                // matrix indexes
    u32 source_column, target_column;  // first columns
    u32 num_columns;
};

template <class Stored, class Body>
TIERBED_FN void map_columns(const Matrix* sources, const Matrix* targets, const Move& move, u64 row, const Body& body) {
    const Stored* from = sources[move.source].row<const Stored>(row) + move.source_column;
    Stored* to = targets[move.target].row<Stored>(row) + move.target_column;
    TIERBED_NO_OVERLAP
    for (u32 c = 0; c < move.num_columns; ++c) body(to[c], from[c]);
}

template <class Stored>
TIERBED_FN void copy_row(const Matrix* sources, const Matrix* targets, const Move* moves, u64 count, u64 row) {
    for (u64 m = 0; m < count; ++m)
        map_columns<Stored>(sources, targets, moves[m], row, [](Stored& to, Stored from) TIERBED_INLINE { to = from; });
}

template <class Type>
TIERBED_FN void add_row(const Matrix* sources, const Matrix* targets, u64 matrices, const Move* moves, u64 count,
                        u64 row) {
    using Stored = typename Type::Stored;
    for (u64 t = 0; t < matrices; ++t) {
        Stored* to = targets[t].row<Stored>(row);
        for (u64 c = 0; c < targets[t].columns; ++c) to[c] = Stored{};
    }
    const auto add = [](Stored& to, Stored from)
                         TIERBED_INLINE { to = Type::store(Type::load(to) + Type::load(from)); };
    for (u64 m = 0; m < count; ++m) map_columns<Stored>(sources, targets, moves[m], row, add);
}

}  // namespace tierbed
