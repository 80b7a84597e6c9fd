/* launch_activate_socket(3) as launchd's own library has it, for what `mini_launchd.py` starts. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

int launch_activate_socket(const char *name, int **fds, size_t *count) {
  static int taken;
  const char *ours = getenv("MINI_LAUNCHD_SOCKET"), *fd = getenv("MINI_LAUNCHD_FD");
  if (!ours || !fd) return ESRCH;
  if (strcmp(name, ours)) return ENOENT;
  if (taken++) return EALREADY;
  *fds = malloc(sizeof **fds);
  (*fds)[0] = atoi(fd);
  *count = 1;
  return 0;
}
