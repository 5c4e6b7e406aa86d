// What GCC's library has only since a version that systems with glibc 2.28 need not have: allocators call it, in code
// that their headers bring along.
#include <new>

#if defined(__GLIBCXX__)
namespace std {

[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() {
    throw bad_array_new_length();
}

}  // namespace std
#endif
