# find_in_python_package(<variable> <package> <path>)
#
# Sets <variable> to the absolute path of a file or folder that <package> installs in the build
# environment, or to nothing. Does not import the package.
function(find_in_python_package variable package path)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "
import importlib.util, pathlib, sys
spec = importlib.util.find_spec(sys.argv[1])
folders = spec.submodule_search_locations if spec else ()
paths = (pathlib.Path(folder, sys.argv[2]) for folder in folders)
print(next((path.as_posix() for path in paths if path.exists()), ''), end='')
" ${package} ${path}
    OUTPUT_VARIABLE found
    COMMAND_ERROR_IS_FATAL ANY)
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()
