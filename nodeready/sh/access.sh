# The modes of the files that users' programs read, of the programs that users run, and of every directory
# above them. Each directory of PATH once: /bin is often a link to /usr/bin. ssh reports its own libraries.
# shellcheck disable=SC2043,SC2170 # @PROGRAMS@ are several; @MAX_LOADED@ is a number
nr_loader=
# glibc's loader, by machine: it lists a program's libraries and starts nothing (ld.so(8)).
for nr_file in /lib64/ld-linux-x86-64.so.2 /lib/ld-linux-aarch64.so.1 /lib64/ld64.so.2 \
    /lib/ld-linux-riscv64-lp64d.so.1; do
    if [ -x "$nr_file" ]; then nr_loader=$nr_file; break; fi
done
nr_path=
IFS=:
for nr_dir in $PATH; do
    case $nr_dir in /*) ;; *) continue ;; esac
    if [ -L "$nr_dir" ] && [ "$nr_dir" -ef "/usr$nr_dir" ]; then continue; fi
    nr_path="$nr_path$nr_dir:"
done
unset IFS
set --
for nr_file in @OPEN_FILES@; do
    if [ -e "$nr_file" ] || [ -L "$nr_file" ]; then set -- "$@" "$nr_file"; fi
done
nr_count=0 nr_words='@UNLOADED@'
for nr_name in @PROGRAMS@; do
    nr_first=
    IFS=:
    for nr_dir in $nr_path; do
        nr_file=$nr_dir/$nr_name
        if [ -f "$nr_file" ] || [ -L "$nr_file" ]; then
            set -- "$@" "$nr_file"
            nr_first=${nr_first:-$nr_file}
        fi
    done
    unset IFS
    if [ -s "$nr_first" ] && [ -x "$nr_first" ] && [ -r "$nr_first" ] &&
        [ -n "$nr_loader" ] && [ ! -e "$nr_first.bin" ] &&
        [ "$nr_name" != ssh ] && [ "$nr_count" -lt @MAX_LOADED@ ]; then
        nr_count=$((nr_count + 1))
        # Only for a message is it asked again, with two more processes.
        "$nr_loader" --list "$nr_first" >/dev/null 2>&1 ||
            nr_out=$(nr_answer "$nr_loader" --list "$nr_first") || case $nr_out in
            *"$nr_words"*) nr_say unloaded "$nr_first ${nr_out##*"$nr_words"}" ;;
            *' not found (required by '*) nr_say unloaded "$nr_first ${nr_out#*: }" ;;
            esac
    fi
done
nr_folders='@FOLDERS@'
nr_rights "$@"
