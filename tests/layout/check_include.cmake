# Compiles a source that includes HEADER with the include path INCLUDES and nothing else of the project.
#
# EXPECTED is `found` (it compiles) or `missing` (it does not, and the reason is that the header is not found).

cmake_minimum_required(VERSION 3.25)

file(WRITE ${SOURCE} "#include \"${HEADER}\"\n")
list(FILTER INCLUDES EXCLUDE REGEX "^$")
list(TRANSFORM INCLUDES PREPEND "-I")
execute_process(
  COMMAND ${COMPILER} -std=c++20 -fsyntax-only ${INCLUDES} ${SOURCE}
  RESULT_VARIABLE result ERROR_VARIABLE errors OUTPUT_VARIABLE errors)

if(EXPECTED STREQUAL "found")
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${HEADER} must compile here, but:\n${errors}")
  endif()
elseif(result EQUAL 0)
  message(FATAL_ERROR "${HEADER} compiles here; this layer must not see it")
elseif(NOT errors MATCHES "${HEADER}(: No such file or directory|' file not found)")
  message(FATAL_ERROR "${HEADER} must not be found, but the error is another one:\n${errors}")
endif()
