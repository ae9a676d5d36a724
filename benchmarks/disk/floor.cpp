// Measures a disk's limit: random 4 KiB reads per second with a given number of reads in flight.
//
// One thread submits direct reads through Linux's asynchronous I/O and ignores the data.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr uint64_t BLOCK = 4096;

struct Files {
    std::vector<int> descriptors;
    std::vector<uint64_t> ends;  // total blocks up to the end of each file

    ~Files() {
        for (const int file : descriptors) close(file);
    }
};

}  // namespace

// Reads for the given seconds. Returns blocks per second, or -errno.
extern "C" double disk_floor(const char* const* paths, int64_t count, int64_t depth, double seconds, uint64_t seed) {
    Files files;
    uint64_t blocks = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int file = open(paths[i], O_RDONLY | O_DIRECT);
        if (file < 0) return -errno;
        files.descriptors.push_back(file);
        struct stat status;
        if (fstat(file, &status) != 0) return -errno;
        blocks += static_cast<uint64_t>(status.st_size) / BLOCK;
        files.ends.push_back(blocks);
    }
    if (blocks == 0) return -ENODATA;
    aio_context_t context = 0;
    if (syscall(SYS_io_setup, depth, &context) != 0) return -errno;
    std::mt19937_64 random(seed);
    auto* memory = static_cast<char*>(std::aligned_alloc(BLOCK, static_cast<std::size_t>(depth) * BLOCK));
    std::vector<iocb> requests(static_cast<std::size_t>(depth));
    std::vector<io_event> done(requests.size());
    const auto submit = [&](std::size_t i) {
        const uint64_t block = random() % blocks;
        const auto file = std::upper_bound(files.ends.begin(), files.ends.end(), block) - files.ends.begin();
        const uint64_t first = file ? files.ends[static_cast<std::size_t>(file - 1)] : 0;
        requests[i] = {};
        requests[i].aio_data = i;
        requests[i].aio_lio_opcode = IOCB_CMD_PREAD;
        requests[i].aio_fildes = static_cast<uint32_t>(files.descriptors[static_cast<std::size_t>(file)]);
        requests[i].aio_buf = reinterpret_cast<uint64_t>(memory + i * BLOCK);
        requests[i].aio_nbytes = BLOCK;
        requests[i].aio_offset = static_cast<int64_t>((block - first) * BLOCK);
        iocb* one = &requests[i];
        return syscall(SYS_io_submit, context, 1, &one) == 1;
    };
    const auto begin = std::chrono::steady_clock::now();
    const auto elapsed = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    double result = 0;
    int64_t reads = 0, in_flight = 0;
    for (std::size_t i = 0; i < requests.size() && result == 0; ++i)
        submit(i) ? static_cast<void>(++in_flight) : static_cast<void>(result = -EIO);
    while (in_flight > 0) {
        const long events = syscall(SYS_io_getevents, context, 1, depth, done.data(), nullptr);
        if (events < 0 && errno == EINTR) continue;
        if (events < 0) return -errno;  // leaks the memory: pending reads may still write to it
        for (long i = 0; i < events; ++i) {
            --in_flight;
            if (done[static_cast<std::size_t>(i)].res != static_cast<int64_t>(BLOCK)) result = -EIO;
            ++reads;
            if (result == 0 && elapsed() < seconds) {
                if (submit(static_cast<std::size_t>(done[static_cast<std::size_t>(i)].data)))
                    ++in_flight;
                else
                    result = -EIO;
            }
        }
    }
    if (result == 0) result = static_cast<double>(reads) / elapsed();
    syscall(SYS_io_destroy, context);
    std::free(memory);
    return result;
}
