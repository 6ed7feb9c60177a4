# cmake -DROOT=<checkout> -DLAYERS=<list> -DRULE=<name> -P check_layout.cmake: one rule about the files on disk.

cmake_minimum_required(VERSION 3.25)
set(problems "")

# relative_files(<variable> <folder> <endings...>): files directly in a folder, as names. Those of a layer's or its tests'
# subfolders belong to the same targets: "subfolder/name".
function(relative_files variable folder)
  set(patterns ${ARGN})
  list(TRANSFORM patterns PREPEND ${ROOT}/${folder}/*)
  string(REGEX REPLACE "^tests/" "" layer ${folder})
  if(layer IN_LIST LAYERS)
    set(deeper ${ARGN})
    list(TRANSFORM deeper PREPEND ${ROOT}/${folder}/*/*)
    list(APPEND patterns ${deeper})
  endif()
  file(GLOB names RELATIVE ${ROOT}/${folder} ${patterns})
  set(${variable} ${names} PARENT_SCOPE)
endfunction()

# complain_of_lines(<file> <regex> <reason>): one problem for each line that matches.
function(complain_of_lines file regex reason)
  file(STRINGS ${ROOT}/${file} lines REGEX "${regex}")
  foreach(line IN LISTS lines)
    string(STRIP "${line}" line)
    string(REPLACE ";" " " line "${line}")
    list(APPEND problems "${file}: ${reason}: ${line}")
  endforeach()
  set(problems ${problems} PARENT_SCOPE)
endfunction()

# complain_if_unlisted(<folder> <endings...>): files that the folder's CMakeLists.txt does not name. What tests share
# may be listed by the tests that use it.
function(complain_if_unlisted folder)
  set(users ${folder}/CMakeLists.txt)
  if(folder STREQUAL "tests/support")
    file(GLOB users RELATIVE ${ROOT} ${ROOT}/tests/*/CMakeLists.txt)
  endif()
  set(listed "")
  foreach(user IN LISTS users)
    file(READ ${ROOT}/${user} text)
    string(APPEND listed "${text}\n")
  endforeach()
  string(REGEX REPLACE "#[^\n]*" "" listed "${listed}")
  string(REGEX REPLACE "[^ \n]*/support/" "" listed "${listed}")
  string(REGEX REPLACE "[ \n\t()]+" ";" listed "${listed}")
  relative_files(sources ${folder} ${ARGN})
  foreach(source IN LISTS sources)
    # Programs of one file may be listed by their name.
    string(REGEX REPLACE "\\.cc$" "" program ${source})
    if(NOT source IN_LIST listed AND NOT (folder MATCHES "^tests/(bench|fuzz)$" AND program IN_LIST listed))
      list(APPEND problems "${folder}/${source}: not in a target of ${folder}/CMakeLists.txt")
    endif()
  endforeach()
  set(problems ${problems} PARENT_SCOPE)
endfunction()

if(RULE STREQUAL "every_source_has_a_test")
  foreach(layer IN LISTS LAYERS)
    relative_files(sources ${layer} .cc .cu)
    foreach(source IN LISTS sources)
      # Backends of one job share the test of the job.
      string(REGEX REPLACE "(_host|_cuda)?\\.(cc|cu)$" "_test.cc" test ${source})
      if(NOT EXISTS ${ROOT}/tests/${layer}/${test})
        list(APPEND problems "${layer}/${source}: there is no tests/${layer}/${test}")
      endif()
    endforeach()
  endforeach()

elseif(RULE STREQUAL "every_file_is_in_a_target")
  foreach(layer IN LISTS LAYERS)
    complain_if_unlisted(${layer} .h .cc .cu .cuh)
    complain_if_unlisted(tests/${layer} .cc .cu)
  endforeach()
  foreach(folder IN ITEMS tests/support tests/bench tests/fuzz tests/examples examples examples/checkpoint_tool
      examples/train_gpt examples/embed)
    if(EXISTS ${ROOT}/${folder}/CMakeLists.txt)
      complain_if_unlisted(${folder} .cc .cu)
    endif()
  endforeach()

elseif(RULE STREQUAL "option_macros_only_in_pickers")
  set(pickers
    params/memory.cc quant/writeback.cc optimizer/step_kernels.cc collectives/make_communicator.cc)
  foreach(layer IN LISTS LAYERS)
    relative_files(sources ${layer} .h .cc .cu .cuh)
    foreach(source IN LISTS sources)
      if(NOT ${layer}/${source} IN_LIST pickers)
        complain_of_lines(${layer}/${source} "^[ \t]*#.*MXOPT_WITH_"
          "the build picks files, only the four pickers choose by macro")
      endif()
    endforeach()
  endforeach()

elseif(RULE STREQUAL "no_forbidden_words")
  foreach(layer IN LISTS LAYERS)
    relative_files(sources ${layer} .h .cc .cu .cuh)
    foreach(source IN LISTS sources)
      set(file ${layer}/${source})
      complain_of_lines(${file} "(TODO|FIXME)" "an open end is an issue, not a comment")
      complain_of_lines(${file} "(^|[^A-Za-z0-9_])[fv]*printf *\\(|std::(cout|cerr|clog)|<iostream>"
        "the library does not print")
      # Launchers say a process's place in its environment, and nowhere else.
      if(NOT file STREQUAL "collectives/launch.cc")
        complain_of_lines(${file} "getenv *\\(" "the library reads no environment variables")
      endif()
      complain_of_lines(${file} "(^|[^A-Za-z0-9_])_?_?(quick_)?exit *\\(|std::terminate" "the library does not exit")
      # Communicator::abort and MPI_Abort are the way to fail together.
      complain_of_lines(${file} "std::abort|(^|[^A-Za-z0-9_])::abort *\\(" "the library does not abort")
    endforeach()
  endforeach()

elseif(RULE STREQUAL "ascii_only")
  foreach(folder IN ITEMS ${LAYERS} tests examples cmake scripts .ci)
    file(GLOB_RECURSE files RELATIVE ${ROOT}
      ${ROOT}/${folder}/*.h ${ROOT}/${folder}/*.cc ${ROOT}/${folder}/*.cu ${ROOT}/${folder}/*.cmake
      ${ROOT}/${folder}/*CMakeLists.txt ${ROOT}/${folder}/*.yaml)
    if(folder MATCHES "^(scripts|.ci)$")
      file(GLOB files RELATIVE ${ROOT} ${ROOT}/${folder}/*)
    endif()
    foreach(file IN LISTS files)
      file(READ ${ROOT}/${file} text)
      if("${text}" MATCHES "[^\t\n -~]")
        list(APPEND problems "${file}: has a character that is not plain ASCII")
      endif()
    endforeach()
  endforeach()

else()
  message(FATAL_ERROR "unknown rule '${RULE}'")
endif()

if(problems)
  list(JOIN problems "\n  " problems)
  message(FATAL_ERROR "${RULE}:\n  ${problems}")
endif()
