// A lower bound for rows in RocksDB: a bare loop over the databases in a tier's folder, opened with the options stored
// there. The caller makes and sorts the keys outside the clock: (bucket, table, key), big-endian, as the databases do.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <rocksdb/db.h>
#include <rocksdb/utilities/options_util.h>
#include <rocksdb/write_batch.h>

#include "../engine/store/native/rocksdb_open.h"

namespace {

constexpr std::size_t KEY_BYTES = 13, BUCKETS = 64, READS = 256, BATCH_BYTES = 256 << 10;

struct Bare {
    std::vector<std::unique_ptr<rocksdb::DB>> shards;
    std::size_t threads;
};

void check(const rocksdb::Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::abort();
}

template <class Task>
void parallel(std::size_t threads, std::size_t tasks, const Task& task) {
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t i; (i = next++) < tasks;) task(i);
    };
    std::vector<std::thread> others;
    for (std::size_t i = 1; i < threads; ++i) others.emplace_back(work);
    work();
    for (auto& thread : others) thread.join();
}

}  // namespace

extern "C" {

void* bare_open(const char* folder, std::size_t shards, std::size_t threads) {
    auto* bare = new Bare{{}, threads};
    for (std::size_t i = 0; i < shards; ++i) {
        const std::string path = std::string(folder) + "/shard-" + std::to_string(i);
        rocksdb::DBOptions options;
        std::vector<rocksdb::ColumnFamilyDescriptor> families;
        check(rocksdb::LoadLatestOptions(rocksdb::ConfigOptions(), path, &options, &families));
        std::vector<rocksdb::ColumnFamilyHandle*> handles;
        std::unique_ptr<rocksdb::DB> db;
        const auto open = [&](auto* where) -> decltype(rocksdb::DB::Open(options, path, families, &handles, where)) {
            return rocksdb::DB::Open(options, path, families, &handles, where);
        };
        check(tierbed::open_into(db, open));
        for (auto* handle : handles) check(db->DestroyColumnFamilyHandle(handle));
        bare->shards.push_back(std::move(db));
    }
    return bare;
}

void bare_close(void* bare) { delete static_cast<Bare*>(bare); }

// keys [n, 13], ascending; begin [65]: the first key of each bucket; lines [n]: addresses of the rows
void bare_fetch(void* handle, const char* keys, const std::uint64_t* begin, const std::uint64_t* lines,
                std::size_t row_bytes) {
    const Bare& bare = *static_cast<Bare*>(handle);
    parallel(bare.threads, BUCKETS, [&](std::size_t bucket) {
        rocksdb::DB& db = *bare.shards[bucket % bare.shards.size()];
        std::vector<rocksdb::Slice> slices(READS);
        std::vector<rocksdb::PinnableSlice> values(READS);
        std::vector<rocksdb::Status> statuses(READS);
        for (std::size_t first = begin[bucket]; first < begin[bucket + 1]; first += READS) {
            const std::size_t count = std::min<std::size_t>(READS, begin[bucket + 1] - first);
            for (std::size_t i = 0; i < count; ++i) slices[i] = {keys + (first + i) * KEY_BYTES, KEY_BYTES};
            db.MultiGet({}, db.DefaultColumnFamily(), count, slices.data(), values.data(), statuses.data(), true);
            for (std::size_t i = 0; i < count; ++i) {
                check(statuses[i]);
                std::memcpy(reinterpret_cast<char*>(lines[first + i]), values[i].data(), row_bytes);
                values[i].Reset();
            }
        }
    });
}

void bare_write(void* handle, const char* keys, const std::uint64_t* begin, const std::uint64_t* lines,
                std::size_t row_bytes) {
    const Bare& bare = *static_cast<Bare*>(handle);
    parallel(bare.threads, bare.shards.size(), [&](std::size_t shard) {
        rocksdb::WriteOptions options;
        options.disableWAL = true;
        rocksdb::WriteBatch batch;
        for (std::size_t bucket = shard; bucket < BUCKETS; bucket += bare.shards.size()) {
            for (std::size_t i = begin[bucket]; i < begin[bucket + 1]; ++i) {
                check(
                    batch.Put({keys + i * KEY_BYTES, KEY_BYTES}, {reinterpret_cast<const char*>(lines[i]), row_bytes}));
                if (batch.GetDataSize() < BATCH_BYTES) continue;
                check(bare.shards[shard]->Write(options, &batch));
                batch.Clear();
            }
        }
        check(bare.shards[shard]->Write(options, &batch));
    });
}
}
