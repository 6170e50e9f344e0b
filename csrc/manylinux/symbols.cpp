// Symbols that g++ 12 uses, and that the glibc and the libstdc++ of manylinux_2_28 do not have yet (stub.py).
#include <new>
#include <sstream>

template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

// False: libstdc++ counts references by atomic operations, as it does in any process of torch's.
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
