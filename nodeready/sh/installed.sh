# A package counts as installed when a command of its name exists (built by hand, from a module tree), or
# when the package manager has it: not every package has such a command. In the second case the programs
# in the package manager's list must exist.
# shellcheck disable=SC2043,SC2086 # @NAMES@ are several; one word per file
nr_broken() {
    if [ -s "$2" ] && [ -x "$2" ]; then return; fi
    nr_word=mode
    if [ ! -s "$2" ]; then nr_word=empty; fi
    if [ ! -e "$2" ]; then
        # Another package has moved it on purpose.
        if grep -asqxF "$2" /var/lib/dpkg/diversions; then return; fi
        nr_word=gone
    fi
    printf 'broken=%s %s %s\n' "$1" "$nr_word" "$2"
}
nr_lists=
for nr_name in @NAMES@; do
    nr_list=/var/lib/dpkg/info/$nr_name.list
    if [ ! -e /var/lib/dpkg/info/"$nr_name".md5sums ]; then
        # Reading that directory takes longer than the rest of this script.
        nr_list=
        for nr_file in /var/lib/dpkg/info/"$nr_name":*.md5sums; do
            if [ -e "$nr_file" ]; then nr_list=${nr_file%.md5sums}.list; fi
        done
    fi
    if [ -n "$nr_list" ]; then printf 'registered=%s\n' "$nr_name"; fi
    if command -v "$nr_name" >/dev/null 2>&1; then continue; fi
    if [ -n "$nr_list" ]; then
        nr_lists="$nr_lists $nr_list"
    elif [ ! -d /var/lib/dpkg/info ] && command -v rpm >/dev/null &&
        rpm -q "$nr_name" >/dev/null 2>&1; then
        printf 'registered=%s\n' "$nr_name"
        for nr_file in $(rpm -ql "$nr_name" | grep -E '^(/usr)?(/local)?/s?bin/[^/]+$'); do
            nr_broken "$nr_name" "$nr_file"
        done
    else
        printf 'missing=%s\n' "$nr_name"
    fi
done
for nr_row in ${nr_lists:+$(grep -asHE '^(/usr)?(/local)?/s?bin/[^/]+$' $nr_lists /dev/null)}; do
    nr_name=${nr_row%%.list:*}
    nr_name=${nr_name##*/}
    nr_broken "${nr_name%%:*}" "${nr_row#*.list:}"
done
