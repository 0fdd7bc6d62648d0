// The thread pool that runs programs: the caller is thread 0, workers spin for a short while after each run and
// then sleep. Ops are separated by a barrier; its last arriver clears the counters of the dynamic loops.
#include "program.h"

#include <pthread.h>
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tandem {

namespace {

constexpr int kLoopSlots = 16;  // at most 8 loops between two barriers, and one barrier's worth being cleared
// A waiting thread sleeps after this many pauses: on a busy machine the thread it waits for may need its core, and one
// that has slept gets a core back sooner than one that has only yielded.
constexpr int kSpinsBeforeSleep = 4000;
constexpr auto kSpinBeforeSleep = std::chrono::microseconds(400);

inline void cpu_pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

struct alignas(64) PaddedCounter {
    std::atomic<int64_t> value{0};
};

struct Scratch {
    uint8_t* data = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(data); }
};

}  // namespace

class Pool {
public:
    explicit Pool(int threads) : threads_(threads), scratch_(threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    void run(const Call* calls, int64_t n_calls, const Step& step) {
        std::lock_guard<std::mutex> one_program_at_a_time(run_mutex_);
        calls_ = calls;
        n_calls_ = n_calls;
        step_ = &step;
        if (threads_ > 1) {
            {
                std::lock_guard<std::mutex> lock(mutex_);
                generation_.fetch_add(1, std::memory_order_release);
            }
            wake_.notify_all();
        }
        walk(0);
    }

    void barrier(Team& team) {
        team.loops = 0;
        if (threads_ == 1) {
            clear_counters();
            return;
        }
        const int phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
            clear_counters();
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1);
            if (sleepers_.load() > 0) wake_sleepers();
            return;
        }
        for (int spins = 0; spins < kSpinsBeforeSleep; spins++) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            cpu_pause();
        }
        sleepers_.fetch_add(1);
        while (phase_.load() == phase) sleep_while(phase);
        sleepers_.fetch_sub(1);
    }

    std::atomic<int64_t>& counter(int loop) { return counters_[loop].value; }

    uint8_t* scratch(int thread, size_t bytes) {
        Scratch& s = scratch_[thread];
        if (s.size < bytes) {
            std::free(s.data);
            s.size = (bytes + 4095) / 4096 * 4096;
            s.data = static_cast<uint8_t*>(std::aligned_alloc(64, s.size));
            if (!s.data) std::abort();
        }
        return s.data;
    }

    int threads() const { return threads_; }

private:
    void walk(int thread) {
        Team team{thread, threads_, this};
        const Call* calls = calls_;
        const int64_t n = n_calls_;
        const Step& step = *step_;
        for (int64_t i = 0; i < n; i++) {
            calls[i].fn(calls[i].args, step, team);
            barrier(team);
        }
    }

    void work(int thread) {
        uint64_t seen = 0;
        for (;;) {
            auto deadline = std::chrono::steady_clock::now() + kSpinBeforeSleep;
            int spins = 0;
            while (generation_.load(std::memory_order_acquire) == seen) {
                cpu_pause();
                if (++spins % 256 == 0 && std::chrono::steady_clock::now() > deadline) {
                    std::unique_lock<std::mutex> lock(mutex_);
                    wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
                }
            }
            seen = generation_.load(std::memory_order_acquire);
            if (stopping_) return;
            walk(thread);
        }
    }

#if defined(__linux__)
    void sleep_while(int phase) { syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0); }
    void wake_sleepers() { syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep_while(int) { sched_yield(); }
    void wake_sleepers() {}
#endif

    void clear_counters() {
        for (auto& c : counters_) c.value.store(0, std::memory_order_relaxed);
    }

    const int threads_;
    std::vector<Scratch> scratch_;
    std::vector<std::thread> workers_;
    std::mutex run_mutex_, mutex_;
    std::condition_variable wake_;
    alignas(64) std::atomic<uint64_t> generation_{0};
    bool stopping_ = false;
    const Call* calls_ = nullptr;
    int64_t n_calls_ = 0;
    const Step* step_ = nullptr;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
    std::atomic<int> sleepers_{0};
    PaddedCounter counters_[kLoopSlots];
};

void Team::barrier() { pool->barrier(*this); }
uint8_t* Team::scratch(size_t bytes) { return pool->scratch(thread, bytes); }
std::atomic<int64_t>& Team::counter(int loop) { return pool->counter(loop); }

}  // namespace tandem

extern "C" {
#pragma GCC visibility push(default)

tandem::Pool* tandem_pool_create(int32_t threads) { return new tandem::Pool(threads < 1 ? 1 : threads); }

void tandem_pool_destroy(tandem::Pool* pool) { delete pool; }

void tandem_pool_run(tandem::Pool* pool, const tandem::Call* calls, int64_t n_calls, const tandem::Step* step) {
    pool->run(calls, n_calls, *step);
}

// Bit 0: AVX2 + FMA + F16C. Bit 1: AVX-512 F, BW, DQ, VL, VBMI, VNNI and GFNI.
int32_t tandem_cpu_features() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int32_t bits = 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) bits |= 1;
    if ((bits & 1) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("gfni"))
        bits |= 2;
    return bits;
#else
    return 0;
#endif
}
#pragma GCC visibility pop
}
