// Throws torch.OutOfMemoryError with a text. The signature is that of c10::detail::torchCheckFail.
#include <c10/util/Exception.h>

extern "C" void gapless_torch_out_of_memory(const char* function, const char* file, unsigned line, const char* text) {
  throw c10::OutOfMemoryError({function, file, line}, text);
}
