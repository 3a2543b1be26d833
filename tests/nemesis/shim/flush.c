/* Preloaded into the processes of a run: while the file UNDERSTUDY_NEMESIS_FLUSH exists, flushes of the journal fail; while
   a file of that name with ".full" exists, its writes find no room. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fails(int descriptor, const char *end) {
    const char *told = getenv("UNDERSTUDY_NEMESIS_FLUSH");
    char link[64], path[4096];
    if (!told) return 0;
    snprintf(path, sizeof path, "%s%s", told, end);
    if (access(path, F_OK) != 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strstr(path, "journal.sqlite") != NULL;
}

static int flush(const char *name, int descriptor) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    if (fails(descriptor, "")) {
        errno = EIO;
        return -1;
    }
    return real(descriptor);
}

int fsync(int descriptor) { return flush("fsync", descriptor); }
int fdatasync(int descriptor) { return flush("fdatasync", descriptor); }

static ssize_t put(const char *name, int descriptor, const void *bytes, size_t count, off_t place) {
    ssize_t (*real)(int, const void *, size_t, off_t) = (ssize_t(*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, name);
    if (fails(descriptor, ".full")) {
        errno = ENOSPC;
        return -1;
    }
    return real(descriptor, bytes, count, place);
}

ssize_t pwrite(int descriptor, const void *bytes, size_t count, off_t place) { return put("pwrite", descriptor, bytes, count, place); }
ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off_t place) { return put("pwrite64", descriptor, bytes, count, place); }
