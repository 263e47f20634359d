// Undefined behaviour ends a fuzz target like any other find; by default it is
// reported and passed over. The name is the sanitizer's.

extern "C" const char* __ubsan_default_options();   // NOLINT
extern "C" const char* __ubsan_default_options() {  // NOLINT
  return "halt_on_error=1:print_stacktrace=1";
}
