// Calls kernels as standard input says, and writes every buffer they were given to standard output.
//
// A call: the length of its name, the name, the number of arguments; of each argument its kind and 8 bytes: an integer
// (0), a float (1), or the size of a buffer (2), whose bytes follow; a size of 0 is a null pointer.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

extern "C" int omp_get_max_threads() { return 2; }

static int64_t number() {
  int64_t found;
  if (std::fread(&found, sizeof found, 1, stdin) != 1) std::exit(0);
  return found;
}

static char* bytes(int64_t size) {
  char* to = (char*)std::malloc(size);
  if (std::fread(to, 1, size, stdin) != (size_t)size) std::abort();
  return to;
}

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  while (true) {
    const int64_t length = number();
    const std::string name(bytes(length), length);
    int64_t whole[16] = {}, count = 0;
    float real = 0;
    std::vector<std::pair<char*, int64_t>> buffers;
    for (int64_t left = number(); left > 0; left--) {
      const int64_t kind = number(), value = number();
      if (kind == 1) std::memcpy(&real, &value, sizeof real);
      else if (kind == 0 || value == 0) whole[count++] = value;
      else whole[count++] = (int64_t)buffers.emplace_back(bytes(value), value).first;
    }
    // Integers and floats go in registers of their own, so their order among each other does not matter, and further
    // arguments do no harm.
    typedef void Kernel(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                        int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float);
    const int64_t* w = whole;
    ((Kernel*)dlsym(library, name.c_str()))(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11],
                                            w[12], w[13], w[14], w[15], real);
    for (const auto& [data, size] : buffers) std::fwrite(data, 1, size, stdout), std::free(data);
    std::fflush(stdout);
  }
}
