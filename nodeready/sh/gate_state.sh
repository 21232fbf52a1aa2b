# The state of the node's own check: its programs, the digests of its files, its last verdict.
# shellcheck disable=SC2043 # @PROGRAMS@ are several
for nr_file in @PROGRAMS@; do
    if [ -x "$nr_file" ]; then printf 'runs=%s\n' "$nr_file"; fi
done
printf 'now=%s\n' "$(date +%s)"
set --
for nr_file in @FILES@ @VERDICT@; do
    if [ -f "$nr_file" ]; then set -- "$@" "$nr_file"; fi
done
if [ $# != 0 ]; then
    sha256sum -- "$@"
    stat -Lc 'file=%Y %u %a %n' -- @ROOTS@ @VERDICT@ 2>/dev/null
fi
if [ -f @NOTE@ ] && read -r nr_note <@NOTE@; then printf 'note=%s\n' "$nr_note"; fi
if [ -f @HELD@ ] && read -r nr_held <@HELD@; then printf 'held=%s\n' "$nr_held"; fi
