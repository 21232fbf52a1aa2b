# nr_answer COMMAND...: run it and print its standard output. Its messages follow, only where the
# command fails, without the loader's messages about a stale /etc/ld.so.preload.
nr_answer() {
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
