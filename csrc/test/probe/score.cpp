// `score LIBRARY...`: opens each and prints "score path", as a program on this processor would ask them.
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
        std::printf("%d %s\n", reinterpret_cast<int32_t (*)()>(score)(), argv[i]);
        std::fflush(stdout);
    }
}
