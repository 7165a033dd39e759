/* Let file operations below a folder fail, or wait, for as long as a state file says so. See failing_files.py.

   Loaded by LD_PRELOAD into every process of a job. The state file holds one int: 0 healthy, an errno, or -1 to wait.
   An errno other than EIO, such as EROFS, is met by changes only; EIO by reads, too; -1 by all operations. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static volatile int *state;
static const char *root;
static size_t root_length;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("FAILING_FILES_STATE");
    root = getenv("FAILING_FILES_ROOT");
    if (!path || !root) return;
    root_length = strlen(root);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof(int), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED) state = mapped;
}

static int is_below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int is_hit(int dir, const char *path, int fd) {
    char link[64], found[4096];
    if (path && path[0] == '/') return is_below(path);
    int of = path ? dir : fd;
    if (of == AT_FDCWD) {
        if (!getcwd(found, sizeof found)) return 0;
        return is_below(found);
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", of);
    ssize_t length = readlink(link, found, sizeof found - 1);
    if (length < 0) return 0;
    found[length] = 0;
    return is_below(found);
}

/* Whether the operation fails; then errno is set. */
static int fails(int dir, const char *path, int fd, int changes) {
    if (!state || !*state) return 0;
    int saved = errno, hit = is_hit(dir, path, fd);
    errno = saved;
    if (!hit) return 0;
    struct timespec pause = {0, 20000000};
    while (*state == -1) nanosleep(&pause, NULL);
    int error = *state;
    if (!error || (!changes && error != EIO)) {
        errno = saved;
        return 0;
    }
    errno = error;
    return 1;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define WRITES(flags) (((flags) & (O_CREAT | O_TRUNC)) || ((flags) & O_ACCMODE) != O_RDONLY)

#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...) {                          \
        REAL(name);                                                       \
        va_list rest;                                                     \
        va_start(rest, flags);                                            \
        mode_t mode = va_arg(rest, mode_t);                               \
        va_end(rest);                                                     \
        if (fails(AT_FDCWD, path, -1, WRITES(flags))) return -1;          \
        return real(path, flags, mode);                                   \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                      \
    int name(int dir, const char *path, int flags, ...) {                 \
        REAL(name);                                                       \
        va_list rest;                                                     \
        va_start(rest, flags);                                            \
        mode_t mode = va_arg(rest, mode_t);                               \
        va_end(rest);                                                     \
        if (fails(dir, path, -1, WRITES(flags))) return -1;               \
        return real(dir, path, flags, mode);                              \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                       \
    FILE *name(const char *path, const char *mode) {                      \
        REAL(name);                                                       \
        if (fails(AT_FDCWD, path, -1, strpbrk(mode, "wa+") != NULL)) return NULL; \
        return real(path, mode);                                          \
    }
FOPEN(fopen)
FOPEN(fopen64)

#define CALL(type, name, dir, path, fd, changes, parameters, arguments)   \
    type name parameters {                                                \
        REAL(name);                                                       \
        if (fails(dir, path, fd, changes)) return -1;                     \
        return real arguments;                                            \
    }
CALL(ssize_t, write, 0, NULL, fd, 1, (int fd, const void *data, size_t size), (fd, data, size))
CALL(ssize_t, pwrite, 0, NULL, fd, 1, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
CALL(ssize_t, pwrite64, 0, NULL, fd, 1, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
CALL(ssize_t, writev, 0, NULL, fd, 1, (int fd, const struct iovec *parts, int count), (fd, parts, count))
CALL(ssize_t, read, 0, NULL, fd, 0, (int fd, void *data, size_t size), (fd, data, size))
CALL(ssize_t, pread, 0, NULL, fd, 0, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
CALL(ssize_t, pread64, 0, NULL, fd, 0, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
CALL(int, fsync, 0, NULL, fd, 1, (int fd), (fd))
CALL(int, fdatasync, 0, NULL, fd, 1, (int fd), (fd))
CALL(int, ftruncate, 0, NULL, fd, 1, (int fd, off_t size), (fd, size))
CALL(int, ftruncate64, 0, NULL, fd, 1, (int fd, off64_t size), (fd, size))
CALL(int, futimens, 0, NULL, fd, 1, (int fd, const struct timespec times[2]), (fd, times))
CALL(int, utimensat, dir, path, dir, 1, (int dir, const char *path, const struct timespec times[2], int flags),
     (dir, path, times, flags))
CALL(int, rename, AT_FDCWD, to, -1, 1, (const char *from, const char *to), (from, to))
CALL(int, renameat, to_dir, to, -1, 1, (int dir, const char *from, int to_dir, const char *to), (dir, from, to_dir, to))
CALL(int, link, AT_FDCWD, to, -1, 1, (const char *from, const char *to), (from, to))
CALL(int, linkat, to_dir, to, -1, 1, (int dir, const char *from, int to_dir, const char *to, int flags),
     (dir, from, to_dir, to, flags))
CALL(int, mkdir, AT_FDCWD, path, -1, 1, (const char *path, mode_t mode), (path, mode))
CALL(int, mkdirat, dir, path, -1, 1, (int dir, const char *path, mode_t mode), (dir, path, mode))
CALL(int, rmdir, AT_FDCWD, path, -1, 1, (const char *path), (path))
CALL(int, unlink, AT_FDCWD, path, -1, 1, (const char *path), (path))
CALL(int, unlinkat, dir, path, -1, 1, (int dir, const char *path, int flags), (dir, path, flags))
CALL(int, stat, AT_FDCWD, path, -1, 0, (const char *path, struct stat *found), (path, found))
CALL(int, lstat, AT_FDCWD, path, -1, 0, (const char *path, struct stat *found), (path, found))
CALL(int, fstatat, dir, path, -1, 0, (int dir, const char *path, struct stat *found, int flags),
     (dir, path, found, flags))
CALL(int, stat64, AT_FDCWD, path, -1, 0, (const char *path, struct stat64 *found), (path, found))
CALL(int, lstat64, AT_FDCWD, path, -1, 0, (const char *path, struct stat64 *found), (path, found))
CALL(int, fstatat64, dir, path, -1, 0, (int dir, const char *path, struct stat64 *found, int flags),
     (dir, path, found, flags))
