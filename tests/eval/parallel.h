// A loop whose turns run on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace sekv_eval {

// Calls turn(i) for i in 0..n, each once. The first exception is thrown on after all have ended.
template <typename Turn>
void parallel_for(int32_t n, int32_t n_threads, const Turn & turn) {
    std::atomic<int32_t> next{0};
    std::exception_ptr problem;
    std::mutex problem_lock;
    const auto work = [&] {
        for (int32_t i = next++; i < n; i = next++) {
            try {
                turn(i);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(problem_lock);
                if (!problem) {
                    problem = std::current_exception();
                }
            }
        }
    };
    std::vector<std::thread> threads;
    for (int32_t i = 1; i < std::min(n, n_threads); i++) {
        threads.emplace_back(work);
    }
    work();
    for (std::thread & thread : threads) {
        thread.join();
    }
    if (problem) {
        std::rethrow_exception(problem);
    }
}

}  // namespace sekv_eval
