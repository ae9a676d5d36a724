// Preloaded into a process: reads, writes or syncs of files by the end of their name, or exchanges of names, fail while
// a test asks for that.
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>

namespace {

char suffix[64];
volatile int failing[3];  // the errno, or 0, of reads, writes and syncs
volatile int failing_exchange;
volatile long failures, passes;  // passes: how many calls succeed before the others fail

bool fails(int what, int file) {
    if (failing[what] == 0) return false;
    char link[32], path[4096];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(link, path, sizeof path);
    const auto tail = static_cast<ssize_t>(std::strlen(suffix));
    if (length < tail || std::memcmp(path + length - tail, suffix, static_cast<std::size_t>(tail)) != 0) return false;
    if (passes > 0 && __atomic_fetch_sub(&passes, 1, __ATOMIC_RELAXED) > 0) return false;
    __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED);
    errno = failing[what];
    return true;
}

template <class Function>
Function* next(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

void fail_io(const char* ending, int read, int write, int sync, long first_passes) {
    passes = first_passes;
    std::snprintf(suffix, sizeof suffix, "%s", ending);
    failing[0] = read;
    failing[1] = write;
    failing[2] = sync;
}

void fail_exchange(int error) { failing_exchange = error; }

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
    static auto* const real = next<int(int, const char*, int, const char*, unsigned)>("renameat2");
    if (failing_exchange == 0 || !(flags & RENAME_EXCHANGE)) return real(from_folder, from, to_folder, to, flags);
    errno = failing_exchange;
    return -1;
}

long io_failures() { return failures; }

ssize_t pread64(int file, void* to, size_t n, off64_t at) {
    static auto* const real = next<ssize_t(int, void*, size_t, off64_t)>("pread64");
    return fails(0, file) ? -1 : real(file, to, n, at);
}

ssize_t pread(int file, void* to, size_t n, off_t at) { return pread64(file, to, n, at); }

ssize_t write(int file, const void* from, size_t n) {
    static auto* const real = next<ssize_t(int, const void*, size_t)>("write");
    return fails(1, file) ? -1 : real(file, from, n);
}

ssize_t pwrite64(int file, const void* from, size_t n, off64_t at) {
    static auto* const real = next<ssize_t(int, const void*, size_t, off64_t)>("pwrite64");
    return fails(1, file) ? -1 : real(file, from, n, at);
}

ssize_t pwrite(int file, const void* from, size_t n, off_t at) { return pwrite64(file, from, n, at); }

int fdatasync(int file) {
    static auto* const real = next<int(int)>("fdatasync");
    return fails(2, file) ? -1 : real(file);
}

int fsync(int file) {
    static auto* const real = next<int(int)>("fsync");
    return fails(2, file) ? -1 : real(file);
}
}
