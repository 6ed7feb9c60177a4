// Linked into MPI tests under sanitizers: libraries that MPI loads stay loaded until the process ends.
//
// Why: Open MPI unloads its plugins in MPI_Finalize. A leak of theirs has no names then, and no suppression
// matches it.

extern "C" int dlclose(void* /*handle*/) {
  return 0;
}
