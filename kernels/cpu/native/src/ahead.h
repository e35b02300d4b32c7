// What the next layer's attention will read, brought near while products compute: with many rows these leave memory alone,
// and attention waits for nothing else.
#pragma once

#include "abi.h"
#include "vec.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include <unistd.h>

// A run of memory that is asked for line by line.
struct Piece {
    const char *at, *last;

    // Nothing: the same line again and again.
    static Piece none(const void* near) { return {(const char*)near, (const char*)near}; }

    void bring() {
        __builtin_prefetch(at, 0, 2);
        at = std::min(at + 64, last);
    }
};

class Ahead {
   public:
    // `next`: the attention that comes next, or null. Its blocks are those of the batch.
    void aim(const Attention* next, const Batch& batch) {
        given_.store(0, std::memory_order_relaxed);
        cache_ = nullptr;
        if (!next || batch.rows < kRows) return;
        bytes_ = next->block_size * 2 * next->kv_heads * next->dim * (next->dtype == kBFloat16 ? 2 : 4);
        if (blocks_.empty()) collect(*next, batch, most_bytes() / bytes_);
        cache_ = (const char*)next->cache;
    }

    // Another block, or nothing. `near`: what is at hand.
    Piece next(const void* near) {
        const int64_t count = (int64_t)blocks_.size();
        if (!cache_ || given_.load(std::memory_order_relaxed) >= count) return Piece::none(near);
        const int64_t place = given_.fetch_add(1, std::memory_order_relaxed);
        if (place >= count) return Piece::none(near);
        const char* first = cache_ + blocks_[place] * bytes_;
        return {first, first + std::max<int64_t>(bytes_ - 64, 0)};
    }

   private:
    // With fewer rows products themselves wait for memory.
    static constexpr int64_t kRows = 12;

    // What the last cache keeps until it is used, beside the weights that come in between.
    static int64_t most_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
        static const int64_t size = sysconf(_SC_LEVEL3_CACHE_SIZE);
        if (size > 0) return size / 5;
#endif
        return 1 << 20;
    }

    void collect(const Attention& a, const Batch& batch, int64_t most) {
        for (int64_t s = 0; s < batch.sequences; s++)
            for (int64_t b = 0; b * a.block_size < batch.lengths[s] && (int64_t)blocks_.size() < most; b++)
                blocks_.push_back(batch.blocks[batch.starts[s] + b]);
    }

    std::vector<int64_t> blocks_;
    const char* cache_ = nullptr;
    int64_t bytes_ = 0;
    alignas(64) std::atomic<int64_t> given_{0};
};
