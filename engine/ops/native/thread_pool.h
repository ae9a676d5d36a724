// The thread pool of native loops: the caller and `threads - 1` workers take numbered tasks until none is left.
//
// Any thread may run any task, so no two tasks may write the same memory. The first exception of a task is rethrown to
// the caller. A second caller at the same time runs its tasks by itself. A forked child starts with a new pool. If the
// threads of torch's OpenMP spin between ops, they are the workers for a thread that runs steps.
#pragma once
#include <cstddef>
#include <functional>

namespace tierbed {

// Sets the number of threads of steps' loops. The calling thread runs steps from now on.
void set_threads(std::size_t threads);

// Gives the calling thread its own pool, so that its loops neither wait for the pool of steps nor use it.
void use_own_pool(std::size_t threads);

void parallel_for(std::size_t tasks, const std::function<void(std::size_t)>& task);

// The same for tasks with `items` items in total. With few items the calling thread does all of them: it ends before
// a worker wakes.
void parallel_for(std::size_t tasks, std::size_t items, const std::function<void(std::size_t)>& task);

// Splits [0, n) into ranges of at most `grain` items.
void parallel_ranges(std::size_t n, std::size_t grain, const std::function<void(std::size_t, std::size_t)>& body);

}  // namespace tierbed
