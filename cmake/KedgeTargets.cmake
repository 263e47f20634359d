# How kedge's libraries, tests and install rules are declared, in one place.

# Headers are included as "kedge/format/segment.h", in the tree and installed.
# One link serves every preset, so that compiler caches see one include path.
set(KEDGE_INCLUDE_ROOT ${CMAKE_CURRENT_SOURCE_DIR}/build/include)
file(MAKE_DIRECTORY ${KEDGE_INCLUDE_ROOT})
if(NOT EXISTS ${KEDGE_INCLUDE_ROOT}/kedge)
  file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR} ${KEDGE_INCLUDE_ROOT}/kedge SYMBOLIC)
endif()

find_program(KEDGE_CCACHE ccache)
if(KEDGE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_CURRENT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${KEDGE_CCACHE})
endif()
find_program(KEDGE_MOLD mold)
if(KEDGE_MOLD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_link_options(-fuse-ld=mold)
endif()

add_library(kedge_options INTERFACE)
set(host $<NOT:$<COMPILE_LANGUAGE:CUDA>>)  # nvcc spells options its own way
set(host_gnu $<AND:${host},$<CXX_COMPILER_ID:GNU>>)
target_compile_options(kedge_options INTERFACE
  $<${host}:-Wall> $<${host}:-Wextra> $<${host_gnu}:-Wshadow=local> $<${host}:-Wno-missing-field-initializers>
  # g++ 12 sees uninitialised reads in StatusOr, and overlaps in std::string, where
  # there are none, once they are inlined deeply.
  $<${host_gnu}:-Wno-maybe-uninitialized> $<${host_gnu}:-Wno-restrict>)
unset(host)
unset(host_gnu)
if(KEDGE_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${KEDGE_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${KEDGE_SANITIZE})
  if(KEDGE_SANITIZE MATCHES undefined)
    # What asan reports as well, at a sixth of the build's time.
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize=null,vptr,object-size>)
  endif()
endif()
if(KEDGE_BUILD_FUZZERS)
  # libFuzzer is led by what it covers in the libraries, too.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
endif()

# kedge_library(<name> HEADERS ... SOURCES ... [DEPENDS ...] [PRIVATE ...] [NO_INSTALL])
# A static library kedge_<name> with the alias kedge::<name>. HEADERS become
# the installed file set, and each is also compiled alone. NO_INSTALL: for the
# tree's own programs only.
function(kedge_library name)
  cmake_parse_arguments(ARG "NO_INSTALL" "" "HEADERS;SOURCES;DEPENDS;PRIVATE" ${ARGN})
  add_library(kedge_${name} STATIC ${ARG_SOURCES})
  add_library(kedge::${name} ALIAS kedge_${name})
  set_target_properties(kedge_${name} PROPERTIES EXPORT_NAME ${name} OUTPUT_NAME kedge_${name})
  target_compile_features(kedge_${name} PUBLIC cxx_std_20)
  target_include_directories(kedge_${name} PUBLIC
    $<BUILD_INTERFACE:${KEDGE_INCLUDE_ROOT}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(kedge_${name} PUBLIC ${ARG_DEPENDS} PRIVATE $<BUILD_INTERFACE:kedge_options> ${ARG_PRIVATE})
  file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  set(alone)
  foreach(header IN LISTS ARG_HEADERS)
    set(unit ${CMAKE_CURRENT_BINARY_DIR}/alone/${header}.cc)
    file(CONFIGURE OUTPUT ${unit} CONTENT "#include \"kedge/${folder}/${header}\"\n")
    list(APPEND alone ${unit})
  endforeach()
  if(KEDGE_BUILD_TESTS AND ARG_HEADERS AND NOT KEDGE_SANITIZE)
    add_library(kedge_${name}_headers_alone OBJECT ${alone})
    target_link_libraries(kedge_${name}_headers_alone PRIVATE kedge_${name})
    target_compile_options(kedge_${name}_headers_alone PRIVATE -O0)  # that it compiles is all
  endif()
  if(NOT ARG_NO_INSTALL)
    install(TARGETS kedge_${name} EXPORT kedge-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
    install(FILES ${ARG_HEADERS} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kedge/${folder})
  endif()
endfunction()

# kedge_hot_sources(<source> ...): what tests spend their time in. Sanitizer builds
# compile without optimisation, which halves their time, but for these.
function(kedge_hot_sources)
  set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS $<$<CONFIG:Debug>:-O1>)
endfunction()

# All that `ctest -L core` and `ctest -L threads` need: what sanitizer builds
# build.
add_custom_target(kedge_core_tests)
add_custom_target(kedge_threads_tests)

# kedge_test(<name> SOURCES ... [DEPENDS ...] [LABELS ...] [TIMEOUT seconds])
# One GoogleTest program; ctest sees the whole program as one test.
function(kedge_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPENDS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS} GTest::gmock GTest::gtest GTest::gtest_main kedge_options)
  target_compile_definitions(${name} PRIVATE KEDGE_SOURCE_DIR="${PROJECT_SOURCE_DIR}" KEDGE_BINARY_DIR="${PROJECT_BINARY_DIR}")
  add_test(NAME ${name} COMMAND ${name})
  foreach(label IN LISTS ARG_LABELS)
    if(TARGET kedge_${label}_tests)
      add_dependencies(kedge_${label}_tests ${name})
    endif()
  endforeach()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(KEDGE_SANITIZE)
    math(EXPR ARG_TIMEOUT "4 * ${ARG_TIMEOUT}")
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
  if(KEDGE_SANITIZE MATCHES thread)
    set_property(TEST ${name} APPEND PROPERTY
      ENVIRONMENT "TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/tsan.supp")
  endif()
endfunction()

function(kedge_install)
  include(CMakePackageConfigHelpers)
  set(destination ${CMAKE_INSTALL_LIBDIR}/cmake/kedge)
  install(EXPORT kedge-targets NAMESPACE kedge:: DESTINATION ${destination})
  if(TARGET kedge_cuda)
    set(KEDGE_FIND_CUDA "find_dependency(CUDAToolkit)")
  endif()
  configure_package_config_file(cmake/kedge-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/kedge-config.cmake
    INSTALL_DESTINATION ${destination})
  write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/kedge-config-version.cmake
    COMPATIBILITY SameMinorVersion)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kedge-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/kedge-config-version.cmake
    DESTINATION ${destination} COMPONENT capi)  # which is nothing without them
endfunction()
