// `score LIBRARY...`: opens each and prints "score path", as a program on this processor would ask them. What the
// processor can run, and is not a score alone, has to pass its self-test.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>

int main(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        void* library = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
        void* score = library ? dlsym(library, "pst_score") : nullptr;
        if (!score) {
            std::fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
        int32_t usable = reinterpret_cast<int32_t (*)()>(score)();
        std::printf("%d %s\n", usable, argv[i]);
        std::fflush(stdout);
        void* test = dlsym(library, "pst_self_test");
        char sentence[300] = "";
        if (test && usable > 0 && reinterpret_cast<int32_t (*)(char*, int32_t)>(test)(sentence, sizeof sentence)) {
            std::fprintf(stderr, "%s: its self-test failed: %s\n", argv[i], sentence);
            return 1;
        }
    }
}
