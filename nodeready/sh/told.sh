# nr_told COMMAND...: run it; its messages are no part of its answer: they are printed behind it,
# and only where it fails, without those of the loader about a stale /etc/ld.so.preload.
nr_told() {
    { nr_message=$("$@" 2>&1 >&3 3>&-); } 3>&1
    nr_status=$?
    if [ "$nr_status" != 0 ] && [ -n "$nr_message" ]; then
        while IFS= read -r nr_words; do
            case $nr_words in 'ERROR: ld.so: object '*) ;; *) printf '%s\n' "$nr_words" ;; esac
        done <<NR_MESSAGE
$nr_message
NR_MESSAGE
    fi
    return "$nr_status"
}
