// Threads that work through a program's phases. A phase is over when all its tasks are done, not when all threads have
// been there: a thread that the system has taken off its core holds up nobody unless it has a task in hand. Who waits
// spins briefly and then sleeps, so that beside other busy processes the core goes to the thread that is waited for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

static inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// `Work` has `int64_t tasks(int phase)` (called once per phase, by one thread, before its first task),
// `void run(int phase, int64_t task, int thread)` and `int phases()`.
template <class Work>
class Pool {
   public:
    // Of `cpus` each thread has one, in turn, but for the caller's own, which is not the pool's; none: any CPU.
    Pool(int threads, const std::vector<int>& cpus) : owner_(getpid()) {
        for (int i = 1; i < threads; i++) {
            threads_.emplace_back([this, i] { serve(i); });
            if (!cpus.empty()) pin(threads_.back(), cpus[i % cpus.size()]);
        }
    }

    ~Pool() {
        if (owner_ != getpid()) {  // after a fork the threads are not there
            for (auto& thread : threads_) thread.detach();
            return;
        }
        stop_.store(true);
        state_.store(next_phase(state_.load()));
        wake();
        for (auto& thread : threads_) thread.join();
    }

    int threads() const { return (int)threads_.size() + 1; }
    bool forked() const { return owner_ != getpid(); }
    void set_spins(int spins) { spins_.store(spins); }

    // Returns when every task of every phase is done.
    void run(Work& work) {
        work_ = &work;
        phase_ = -1;
        over_.store(false);
        advance(0);
        while (!over_.load(std::memory_order_acquire)) {
            uint64_t seen = state_.load(std::memory_order_acquire);
            if (over_.load(std::memory_order_acquire)) break;
            if (!claim(seen, 0)) await(seen);
        }
    }

   private:
    // Where the system does not take it, the thread runs anywhere.
    static void pin(std::thread& thread, int cpu) {
#if defined(__linux__)
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
#else
        (void)thread, (void)cpu;
#endif
    }

    // Upper half: a number that changes with each phase. Lower half: tasks that nobody has taken.
    static uint64_t next_phase(uint64_t state) { return ((state >> 32) + 1) << 32; }

    bool claim(uint64_t seen, int thread) {
        const uint32_t left = (uint32_t)seen;
        if (left == 0) return false;
        if (!state_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) return true;
        // From here on the phase cannot end without this task.
        work_->run(phase_, left - 1, thread);
        if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) advance(thread);
        return true;
    }

    // The next phase with more than one task; those with one are done on the way.
    void advance(int thread) {
        for (;;) {
            if (++phase_ >= work_->phases()) {
                over_.store(true, std::memory_order_release);
                state_.store(next_phase(state_.load()), std::memory_order_release);
                break;
            }
            const int64_t tasks = work_->tasks(phase_);
            if (tasks > 1 && !threads_.empty()) {
                pending_.store(tasks, std::memory_order_relaxed);
                state_.store(next_phase(state_.load()) | (uint32_t)tasks, std::memory_order_release);
                break;
            }
            for (int64_t task = 0; task < tasks; task++) work_->run(phase_, task, thread);
        }
        wake();
    }

    void wake() {
        epoch_.fetch_add(1);
        epoch_.notify_all();
    }

    void await(uint64_t seen) {
        for (int i = spins_.load(std::memory_order_relaxed); i > 0; i--) {
            if (state_.load(std::memory_order_relaxed) != seen) return;
            relax();
        }
        const uint32_t epoch = epoch_.load();
        // Whoever changes the state counts the epoch afterwards.
        if (state_.load() == seen) epoch_.wait(epoch);
    }

    void serve(int thread) {
        while (!stop_.load(std::memory_order_acquire)) {
            const uint64_t seen = state_.load(std::memory_order_acquire);
            if (!claim(seen, thread)) await(seen);
        }
    }

    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int64_t> pending_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<bool> over_{true};
    std::atomic<bool> stop_{false};
    std::atomic<int> spins_{2000};
    Work* work_ = nullptr;
    int phase_ = 0;
    pid_t owner_;
    std::vector<std::thread> threads_;
};
