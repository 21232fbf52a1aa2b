# nr_as USER COMMAND: run a line of our library with this user's rights: a link in a home
# directory then leads nowhere that the user could not write anyway.
nr_as() {
    # In the environment, which is that user's alone; arguments can be read by everybody.
    NR_TEXT=$NR_LIB$2
    export NR_TEXT
    if command -v runuser >/dev/null 2>&1; then
        # shellcheck disable=SC2016 # the other shell's variable
        runuser -u "$1" -- sh -c 'eval "$NR_TEXT"' || exit 1
    else
        # shellcheck disable=SC2016 # the other shell's variable
        su -s /bin/sh "$1" -c 'eval "$NR_TEXT"' || exit 1
    fi
    unset NR_TEXT
}
