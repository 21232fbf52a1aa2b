# The kernel's table of mounts. The states of the processes first, and then the table: one awk less.
nr_look() {
    nr_looked=$(NR_WANTED=@WANTED@ awk "$nr_fields$nr_states"'
BEGIN {
    print "table"
    ARGV[1] = "@TABLE@"
    ARGC = 2
}
@ROWS@' /proc/[0-9]*/stat 2>/dev/null)
}
if nr_look || nr_look || nr_look; then
    nr_table=${nr_looked#*"
table
"}
    nr_sorted=${nr_looked%%"
table
"*}
fi
if [ -z "${nr_table:-}" ]; then nr_table=$(NR_WANTED=@WANTED@ awk '@ROWS@' @TABLE@); fi
printf '%s\n' "$nr_table"
