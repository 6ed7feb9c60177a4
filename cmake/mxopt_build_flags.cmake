# One private interface target with the flags that every object of this project is built with.

add_library(mxopt_build_flags INTERFACE)
target_compile_options(mxopt_build_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion>
  # The numerics contract: no contraction, no fast math; a fused multiply-add is written fma().
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>
  $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>
  # C++20 as a flag, since CMake 3.25 does not know it for CUDA. Device code calls constexpr functions of the standard
  # library.
  $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 sees overlapping copies inside std::string that are not there.
  target_compile_options(mxopt_build_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(MXOPT_WERROR)
  target_compile_options(mxopt_build_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>)
endif()
if(MXOPT_SANITIZE)
  target_compile_options(mxopt_build_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${MXOPT_SANITIZE} -fno-omit-frame-pointer
      -fno-sanitize-recover=all -DMXOPT_SANITIZED=1 -DMXOPT_NO_HOST_CLONES=1>)
  target_link_options(mxopt_build_flags INTERFACE -fsanitize=${MXOPT_SANITIZE})
endif()
