/* A stand-in for libnvidia-ml.so.1: reads "key value" lines from $NVML_STUB_STATE at each call.
   keys: init (return code), count, <i>.free <i>.used <i>.total (MiB), <i>.name, <i>.uuid, <i>.v2 (return code),
   <i>.power (mW; absent: not supported), <i>.unlisted (processes cannot be listed), <i>.pid, <i>.pid_mib (absent: not told),
   <i>.draws, <i>.draws_mib (the same for a process that draws), <i>.display, <i>.capability (major * 10 + minor) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOT_SUPPORTED 3
#define NOT_FOUND 6

static char value[256];

static const char *get(const char *prefix, int index, const char *key) {
    char wanted[64], name[64];
    FILE *file = fopen(getenv("NVML_STUB_STATE"), "r");
    if (!file) return NULL;
    if (index < 0) snprintf(wanted, sizeof wanted, "%s%s", prefix, key);
    else snprintf(wanted, sizeof wanted, "%d.%s", index, key);
    while (fscanf(file, "%63s %255[^\n]", name, value) == 2)
        if (!strcmp(name, wanted)) { fclose(file); return value; }
    fclose(file);
    return NULL;
}

static unsigned long long mib(int index, const char *key) {
    const char *text = get("", index, key);
    return text ? strtoull(text, NULL, 10) << 20 : 0;
}

static int text(int index, const char *key, char *out, unsigned size) {
    const char *found = get("", index, key);
    if (!found) return NOT_SUPPORTED;
    snprintf(out, size, "%s", found);
    return 0;
}

int nvmlInitWithFlags(unsigned flags) { const char *c = get("", -1, "init"); (void)flags; return c ? atoi(c) : 0; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : code == 3 ? "Not Supported" : "error"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "580.1"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { const char *c = get("", -1, "count"); *n = c ? atoi(c) : 0; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(size_t)(i + 1); return 0; }
static int at(void *h) { return (int)(size_t)h - 1; }
int nvmlDeviceGetName(void *h, char *out, unsigned size) { return text(at(h), "name", out, size); }
int nvmlDeviceGetUUID(void *h, char *out, unsigned size) { return text(at(h), "uuid", out, size); }

struct memory1 { unsigned long long total, free, used; };
struct memory2 { unsigned version; unsigned long long total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo(void *h, struct memory1 *m) {
    m->total = mib(at(h), "total"); m->free = mib(at(h), "free"); m->used = mib(at(h), "used") + (645ull << 20);
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *h, struct memory2 *m) {
    const char *code = get("", at(h), "v2");
    if (code) return atoi(code);
    m->total = mib(at(h), "total"); m->reserved = 645ull << 20; m->free = mib(at(h), "free"); m->used = mib(at(h), "used");
    return 0;
}
int nvmlDeviceGetPowerManagementLimit(void *h, unsigned *mw) {
    const char *found = get("", at(h), "power");
    if (!found) return NOT_SUPPORTED;
    *mw = strtoul(found, NULL, 10);
    return 0;
}

struct process { unsigned pid; unsigned long long used; unsigned gpu, compute; };

static int processes(void *h, const char *key, const char *mib_key, unsigned *n, struct process *out) {
    const char *pid = get("", at(h), key);
    unsigned number = pid ? atoi(pid) : 0;
    if (!number) { *n = 0; return 0; }
    if (*n < 1 || !out) { *n = 1; return 7; }
    out->pid = number;
    out->used = get("", at(h), mib_key) ? mib(at(h), mib_key) : ~0ull;
    out->gpu = out->compute = 0;
    *n = 1;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, struct process *out) {
    if (get("", at(h), "unlisted")) return NOT_SUPPORTED;
    return processes(h, "pid", "pid_mib", n, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *n, struct process *out) {
    if (get("", at(h), "unlisted")) return NOT_SUPPORTED;
    return processes(h, "draws", "draws_mib", n, out);
}
int nvmlDeviceGetDisplayActive(void *h, unsigned *active) {
    const char *found = get("", at(h), "display");
    if (!found) return NOT_SUPPORTED;
    *active = atoi(found);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
    const char *found = get("", at(h), "capability");
    if (!found) return NOT_SUPPORTED;
    *major = atoi(found) / 10;
    *minor = atoi(found) % 10;
    return 0;
}
