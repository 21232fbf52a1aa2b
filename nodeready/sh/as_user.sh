# nr_as USER COMMAND: run a line of our library with this user's rights: a link in a home
# directory then leads nowhere that the user could not write anyway.
nr_as() {
    if command -v runuser >/dev/null 2>&1; then
        runuser -u "$1" -- sh -c "$NR_LIB$2" || exit 1
    else
        su -s /bin/sh "$1" -c "$NR_LIB$2" || exit 1
    fi
}
