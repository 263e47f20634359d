/* kedge.h as a C99 compiler sees it, without extensions and with warnings as
 * errors: sizes of its structs, which capi_test compares with those that the
 * library was built with. */

#include "kedge/capi/kedge.h"

const size_t kedge_test_sizes_in_c[] = {sizeof(kedge_version_id),
                                        sizeof(kedge_range),
                                        sizeof(kedge_metadata),
                                        sizeof(kedge_named_bytes),
                                        sizeof(kedge_coordinator_options),
                                        sizeof(kedge_tensor),
                                        sizeof(kedge_writer_options),
                                        sizeof(kedge_store_options),
                                        sizeof(kedge_publish_options),
                                        sizeof(kedge_publish_result),
                                        sizeof(kedge_parameter),
                                        sizeof(kedge_quantised_tensor),
                                        sizeof(kedge_hook_options),
                                        sizeof(kedge_hook_result),
                                        sizeof(kedge_hook_memory),
                                        sizeof(kedge_target),
                                        sizeof(kedge_weight_set),
                                        sizeof(kedge_reader_options),
                                        sizeof(kedge_update_result),
                                        0};

/* Callbacks and handles from C. */
static kedge_status Pause(void* user) {
  *(int*)user += 1;
  return KEDGE_OK;
}

int kedge_test_pauses_in_c(void) {
  int pauses = 0;
  const kedge_pause_callback pause = Pause;
  return pause(&pauses) == KEDGE_OK ? pauses : -1;
}

/* Sums values of `count` ranks in rank order; what a reducer in C does. */
void kedge_test_add_in_c(uint64_t* sum, const uint64_t* values, size_t count) {
  size_t i;
  for (i = 0; i < count; ++i) sum[i] += values[i];
}
