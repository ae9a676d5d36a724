// Columns of matrices moved to other matrices, and the gradients of such moves.
//
// One tile works on one row of all matrices. `move_columns` copies numbers of any type; targets keep what no move
// writes. `add_columns` begins with zeros and adds the moves in their order, each sum rounded to the type.
#pragma once
#include "half.h"
#include "portable.h"

namespace tierbed {

struct Float64 {
    using Stored = double;
    TIERBED_FN static double load(Stored x) { return x; }
    TIERBED_FN static Stored store(double x) { return x; }
};

struct Matrix {
    u64 address, stride;  // of the first row; bytes from row to row
    u64 columns;

    template <class Stored>
    TIERBED_FN Stored* row(u64 number) const {
        return reinterpret_cast<Stored*>(address + number * stride);
    }
};

struct Move {
    u32 source, target;  // matrices
    u32 from, to;        // their first columns
    u32 count;
};

// Calls body(source, target, column) for each column of a move, a target's column always on the same lane.
template <class Body>
TIERBED_FN void each_column(Tile tile, const Move& move, const Body& body) {
    const u32 first = (tile.lane + tile.size - move.to % tile.size) % tile.size;
    TIERBED_NO_OVERLAP
    for (u32 c = first; c < move.count; c += tile.size) body(c);
}

template <class Stored>
TIERBED_FN void move_columns(Tile tile, const Matrix* sources, const Matrix* targets, const Move* moves, u64 count,
                             u64 row) {
    for (u64 m = 0; m < count; ++m) {
        const Move move = moves[m];
        const Stored* from = sources[move.source].row<const Stored>(row) + move.from;
        Stored* to = targets[move.target].row<Stored>(row) + move.to;
        each_column(tile, move, [&](u32 c) TIERBED_INLINE { to[c] = from[c]; });
    }
}

template <class Type>
TIERBED_FN void add_columns(Tile tile, const Matrix* sources, const Matrix* targets, u64 matrices, const Move* moves,
                            u64 count, u64 row) {
    using Stored = typename Type::Stored;
    for (u64 t = 0; t < matrices; ++t) {
        Stored* to = targets[t].row<Stored>(row);
        for (u64 c = tile.lane; c < targets[t].columns; c += tile.size) to[c] = Stored{};
    }
    for (u64 m = 0; m < count; ++m) {
        const Move move = moves[m];
        const Stored* from = sources[move.source].row<const Stored>(row) + move.from;
        Stored* to = targets[move.target].row<Stored>(row) + move.to;
        each_column(tile, move, [&](u32 c) TIERBED_INLINE { to[c] = Type::store(Type::load(to[c]) + Type::load(from[c])); });
    }
}

}  // namespace tierbed
