// The native loops' thread pool. The caller and `num_threads - 1` workers run numbered tasks.
//
// Any thread may run any task, so no two tasks may write the same memory. The first exception of a task is rethrown to
// the caller. While one caller uses the pool, others run their tasks without workers. A forked child starts a new pool.
// torch's OpenMP threads may spin between ops. Then a thread that runs steps uses the OpenMP threads as workers.
#pragma once
#include <cstddef>
#include <functional>

namespace tierbed {

// Sets how many threads run the loops of a step. Marks the calling thread as a thread that runs steps.
void set_num_threads(std::size_t num_threads);

// Gives the calling thread its own pool, so that its loops do not compete for the steps' pool.
void use_own_pool(std::size_t num_threads);

// Calls task(i) for i in [0, num_tasks).
void parallel_for(std::size_t num_tasks, const std::function<void(std::size_t)>& task);

// Calls task(i) for i in [0, num_tasks). num_items: the tasks' total size. If it is small, the caller runs all.
void parallel_for(std::size_t num_tasks, std::size_t num_items, const std::function<void(std::size_t)>& task);

// Divides [0, n) into ranges of at most `grain` items, and calls body(begin, end) for each range.
void parallel_ranges(std::size_t n, std::size_t grain, const std::function<void(std::size_t, std::size_t)>& body);

}  // namespace tierbed
