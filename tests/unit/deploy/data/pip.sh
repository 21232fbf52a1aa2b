#!/bin/sh
echo "$*" >>HERE/called
while [ "$1" != --dest ]; do shift; done
cp HERE/index/*.whl "$2" 2>/dev/null && exit
echo 'WARNING: retrying' >&2
echo 'ERROR: No matching distribution' >&2
exit 1
