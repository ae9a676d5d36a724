// Preloaded into a process: kills it at a chosen call that changes files below a folder, and traces those calls.
//
// The trace is what a simulated power cut needs: power.py reads it. A line is what was done, the path, and what that
// needs more, separated by tabs, and a full stop behind a last tab; it is written when the call has returned. A kill may
// cut a line off, so each begins a line of its own. Names that a rename or an unlink takes away are linked aside before.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

enum When { before, after, torn };

std::string watched;  // with a slash at its end; empty before the start
std::string aside;    // a folder of the same filesystem
int trace_file = -1;  // where there is one
long taken;           // names linked aside

char call_to_die_at[16];  // "any", or empty
volatile long calls_left;
volatile int when_to_die;
volatile int full;  // whether the disk of the folder has no room

template <class Function>
Function* next(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

void die() {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

std::string link_of(const char* proc_link) {
    char path[4096];
    const ssize_t length = readlink(proc_link, path, sizeof path);
    return length > 0 ? std::string(path, static_cast<std::size_t>(length)) : std::string();
}

std::string path_of(int file) {
    char name[48];
    std::snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    return link_of(name);
}

std::string path_of(int folder, const char* path) {
    if (path[0] == '/') return path;
    const std::string parent = folder == AT_FDCWD ? link_of("/proc/self/cwd") : path_of(folder);
    return parent + "/" + path;
}

bool is_watched(const std::string& path) { return !watched.empty() && path.compare(0, watched.size(), watched) == 0; }

std::string number_of(const struct stat& found) { return std::to_string(found.st_ino); }

std::string file_number(int file) {
    struct stat found;
    return fstat(file, &found) == 0 ? number_of(found) : "0";
}

bool is_time(const char* call) {
    if (call_to_die_at[0] == 0) return false;
    if (std::strcmp(call_to_die_at, "any") != 0 && std::strcmp(call_to_die_at, call) != 0) return false;
    return __atomic_sub_fetch(&calls_left, 1, __ATOMIC_RELAXED) == 0;
}

void trace(const char* done, const std::string& path, const std::string& more = "") {
    if (trace_file < 0) return;
    static auto* const real = next<ssize_t(int, const void*, size_t)>("write");
    const std::string line = "\n" + std::string(done) + "\t" + path + "\t" + more + "\t.";
    if (real(trace_file, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
}

// A second name for a file, which stays; empty for what is no file.
std::string keep_aside(const std::string& path) {
    static auto* const real = next<int(const char*, const char*)>("link");
    struct stat found;
    if (trace_file < 0 || lstat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) return "";
    const long number = __atomic_add_fetch(&taken, 1, __ATOMIC_RELAXED);
    const std::string place = aside + "/" + std::to_string(getpid()) + "-" + std::to_string(number);
    if (real(path.c_str(), place.c_str()) != 0) {
        if (errno != ENOENT) std::abort();
        return "";  // another rank has removed it meanwhile
    }
    return place;
}

// One call, which returns less than 0 where it fails. `tear` does a part of it, `note` traces what was done.
template <class Do, class Note, class Tear>
auto watched_call(const char* call, Do act, Note note, Tear tear) {
    const bool last = is_time(call);
    if (last && when_to_die == torn) tear();
    if (last && when_to_die != after) die();
    const auto result = act();
    if (result >= 0) note(result);
    if (last) die();
    return result;
}

template <class Do, class Note>
auto watched_call(const char* call, Do act, Note note) {
    return watched_call(call, act, note, [] {});
}

template <class Do>
int open_at(int folder, const char* name, int flags, Do act) {
    if (watched.empty() || !(flags & (O_CREAT | O_TRUNC))) return act();
    const std::string path = path_of(folder, name);
    if (!is_watched(path)) return act();
    struct stat found;
    const bool there = lstat(path.c_str(), &found) == 0;
    if (there && !(flags & O_TRUNC)) return act();
    return watched_call("open", act, [&](int file) { trace(there ? "write" : "create", path, file_number(file)); });
}

template <class Do, class Half>
ssize_t write_to(int file, Do act, Half half) {
    if (watched.empty()) return act();
    const std::string path = path_of(file);
    if (!is_watched(path)) return act();
    if (full) {
        errno = ENOSPC;
        return -1;
    }
    const auto note = [&](ssize_t) { trace("write", path, file_number(file)); };
    return watched_call("write", act, note, [&] {
        if (half() >= 0) note(0);
    });
}

template <class Do>
int sync(int file, Do act) {
    if (watched.empty()) return act();
    const std::string path = path_of(file);
    struct stat found;
    if (!is_watched(path + "/") || fstat(file, &found) != 0) return act();
    return watched_call("sync", act, [&](int) {
        if (S_ISDIR(found.st_mode))
            trace("sync folder", path);
        else
            trace("sync", path, number_of(found) + "\t" + std::to_string(found.st_size));
    });
}

template <class Do>
int take_away(const std::string& path, Do act) {
    struct stat found;
    if (!is_watched(path) || lstat(path.c_str(), &found) != 0) return act();
    const std::string kept = keep_aside(path);
    return watched_call("unlink", act, [&](int) {
        if (S_ISDIR(found.st_mode)) trace("rmdir", path);
        if (S_ISREG(found.st_mode)) trace("unlink", path, kept);
    });
}

template <class Do>
int move(const std::string& from, const std::string& to, Do act) {
    if (!is_watched(from)) return act();
    const std::string kept = keep_aside(to);
    return watched_call("rename", act, [&](int) { trace("rename", from, to + "\t" + kept); });
}

template <class Do>
int swap(const std::string& one, const std::string& other, Do act) {
    if (!is_watched(one)) return act();
    return watched_call("rename", act, [&](int) { trace("exchange", one, other); });
}

template <class Do>
int make(const std::string& path, Do act) {
    if (!is_watched(path)) return act();
    return watched_call("mkdir", act, [&](int) { trace("mkdir", path); });
}

template <class Do>
int join(const std::string& to, Do act) {
    if (!is_watched(to)) return act();
    return watched_call("link", act, [&](int) { trace("link", to); });
}

}  // namespace

extern "C" {

void watch_calls(const char* folder, const char* keep, int trace) {
    aside = keep;
    trace_file = trace;
    watched = std::string(folder) + "/";
}

void die_at(const char* call, long number, int when) {
    calls_left = number;
    when_to_die = when;
    std::snprintf(call_to_die_at, sizeof call_to_die_at, "%s", call);
}

void fill_disk(int filled) { full = filled; }

#define REAL(name) static auto* const real = next<decltype(::name)>(#name)
#define SAME(name) __attribute__((alias(#name)))  // on systems of 64 bits

int open(const char* name, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const int mode = va_arg(more, int);
    va_end(more);
    REAL(open);
    return open_at(AT_FDCWD, name, flags, [&] { return real(name, flags, mode); });
}
int open64(const char* name, int flags, ...) SAME(open);
int openat64(int folder, const char* name, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const int mode = va_arg(more, int);
    va_end(more);
    REAL(openat64);
    return open_at(folder, name, flags, [&] { return real(folder, name, flags, mode); });
}
ssize_t write(int file, const void* from, size_t n) {
    REAL(write);
    return write_to(file, [&] { return real(file, from, n); }, [&] { return real(file, from, n / 2); });
}
ssize_t pwrite64(int file, const void* from, size_t n, off64_t at) {
    REAL(pwrite64);
    return write_to(file, [&] { return real(file, from, n, at); }, [&] { return real(file, from, n / 2, at); });
}
ssize_t pwrite(int file, const void* from, size_t n, off_t at) SAME(pwrite64);
int ftruncate64(int file, off64_t size) {
    REAL(ftruncate64);
    const auto act = [&] { return real(file, size); };
    return static_cast<int>(write_to(file, act, act));
}
int ftruncate(int file, off_t size) SAME(ftruncate64);
int fsync(int file) {
    REAL(fsync);
    return sync(file, [&] { return real(file); });
}
int fdatasync(int file) {
    REAL(fdatasync);
    return sync(file, [&] { return real(file); });
}
int rename(const char* from, const char* to) {
    REAL(rename);
    return move(path_of(AT_FDCWD, from), path_of(AT_FDCWD, to), [&] { return real(from, to); });
}
int renameat(int from_folder, const char* from, int to_folder, const char* to) {
    REAL(renameat);
    const auto act = [&] { return real(from_folder, from, to_folder, to); };
    return move(path_of(from_folder, from), path_of(to_folder, to), act);
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
    REAL(renameat2);
    const auto act = [&] { return real(from_folder, from, to_folder, to, flags); };
    const std::string one = path_of(from_folder, from), other = path_of(to_folder, to);
    return flags & RENAME_EXCHANGE ? swap(one, other, act) : move(one, other, act);
}
int unlink(const char* name) {
    REAL(unlink);
    return take_away(path_of(AT_FDCWD, name), [&] { return real(name); });
}
int unlinkat(int folder, const char* name, int flags) {
    REAL(unlinkat);
    return take_away(path_of(folder, name), [&] { return real(folder, name, flags); });
}
int rmdir(const char* name) {
    REAL(rmdir);
    return take_away(path_of(AT_FDCWD, name), [&] { return real(name); });
}
int mkdir(const char* name, mode_t mode) {
    REAL(mkdir);
    return make(path_of(AT_FDCWD, name), [&] { return real(name, mode); });
}
int mkdirat(int folder, const char* name, mode_t mode) {
    REAL(mkdirat);
    return make(path_of(folder, name), [&] { return real(folder, name, mode); });
}
int link(const char* from, const char* to) {
    REAL(link);
    return join(path_of(AT_FDCWD, to), [&] { return real(from, to); });
}
int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
    REAL(linkat);
    const auto act = [&] { return real(from_folder, from, to_folder, to, flags); };
    return join(path_of(to_folder, to), act);
}
}
