#!/bin/sh
# A stand-in: prints recorded answers.
cd /.lab/nvidia-smi || exit
if [ -e before ]; then . ./before; fi
case " $* " in
*" nvlink "*) exec cat nvlink ;;
*" -q -x "* | *" -x -q "* | *" -qx "* | *" -xq "*) exec cat query.xml ;;
*" -L "* | *" --list-gpus "*) exec cat list ;;
"  ") exec cat list ;;
esac
printf 'Invalid combination of input arguments. Please run '\''nvidia-smi -h'\'' for help.\n\n'
exit 6
