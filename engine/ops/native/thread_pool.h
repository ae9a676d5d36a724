// A small thread pool: the caller and `threads - 1` workers take numbered tasks until none is left.
//
// Which thread takes which task varies, so a task must own what it writes. The first exception of a task is rethrown to
// the caller. A second caller at the same time runs its tasks alone; a forked child starts with a fresh pool. Where the
// threads of torch's OpenMP spin between its ops, they are the workers of a thread that makes steps.
#pragma once
#include <cstddef>
#include <functional>

namespace tierbed {

// The number for the loops of steps. The calling thread makes steps from here on.
void set_threads(std::size_t threads);

// From here on the loops of this thread run on a pool of its own, so that they never wait for, or take, that of steps.
void use_own_pool(std::size_t threads);

void parallel_for(std::size_t tasks, const std::function<void(std::size_t)>& task);

// The same for tasks that have so many items together: of few, the caller does all, which is done before a worker
// wakes.
void parallel_for(std::size_t tasks, std::size_t items, const std::function<void(std::size_t)>& task);

// Splits [0, n) into ranges of at most `grain` items.
void parallel_ranges(std::size_t n, std::size_t grain, const std::function<void(std::size_t, std::size_t)>& body);

}  // namespace tierbed
